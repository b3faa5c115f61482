//! Where pages are placed: the memory policy of the file, set before the first page is there.
//!
//! A policy that is set through a shared mapping of tmpfs belongs to the file, so it holds for every page whoever
//! touches or reserves it, and for every process (`mbind(2)`, and "Shared Policies" in the kernel's
//! admin-guide/mm/numa_memory_policy).

#![allow(unsafe_code)] // `mbind` has no wrapper in libc or nix

use std::io;

use nix::errno::Errno;
use nix::libc;

use crate::mapping::{Mapping, page_bytes};
use crate::spec::Numa;

/// The kernel's own limit is `CONFIG_NODES_SHIFT`, 10 bits at most.
pub const MAX_NODES: u32 = 1024;
const WORD_BITS: u32 = u64::BITS;
/// The kernel looks at one bit less than it is told.
const MASK_BITS: libc::c_ulong = MAX_NODES as libc::c_ulong + 1;

// linux/mempolicy.h
const MPOL_PREFERRED: libc::c_int = 1;
const MPOL_INTERLEAVE: libc::c_int = 3;
const MPOL_F_MEMS_ALLOWED: libc::c_ulong = 1 << 2;

type Mask = [u64; (MAX_NODES / WORD_BITS) as usize];

/// Sets the policy for the whole file behind the mapping.
///
/// A node is preferred and not bound to: where it is full, the kernel would rather kill than leave it.
///
/// # Errors
/// The error of `mbind(2)` or `get_mempolicy(2)`: `EPERM` or `ENOSYS` where a sandbox forbids them, `EINVAL` for a
/// node that does not exist or that this process may not use.
pub fn apply(numa: Numa, mapping: &Mapping) -> io::Result<()> {
    let (mode, mask) = match numa {
        Numa::Default => return Ok(()),
        Numa::Interleave => (MPOL_INTERLEAVE, allowed_nodes()?),
        Numa::Node(node) => (MPOL_PREFERRED, mask_of(node).ok_or(Errno::EINVAL)?),
    };
    let len = mapping.len_bytes().next_multiple_of(page_bytes());
    // SAFETY: mbind changes no byte; the range is the mapping, the mask is read and lives here.
    Errno::result(unsafe {
        libc::syscall(
            libc::SYS_mbind,
            mapping.as_ptr(),
            len,
            mode,
            mask.as_ptr(),
            MASK_BITS,
            0,
        )
    })?;
    Ok(())
}

/// The nodes that this process may take memory from (its cpuset).
fn allowed_nodes() -> io::Result<Mask> {
    let mut mask = Mask::default();
    // SAFETY: the kernel writes at most MAX_NODES bits to the mask, and nothing else.
    Errno::result(unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            std::ptr::null_mut::<libc::c_int>(),
            mask.as_mut_ptr(),
            MASK_BITS,
            std::ptr::null::<libc::c_void>(),
            MPOL_F_MEMS_ALLOWED,
        )
    })?;
    Ok(mask)
}

fn mask_of(node: u32) -> Option<Mask> {
    let mut mask = Mask::default();
    *mask.get_mut((node / WORD_BITS) as usize)? |= 1 << (node % WORD_BITS);
    Some(mask)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_a_bit() {
        assert_eq!(mask_of(0).unwrap()[0], 1);
        assert_eq!(mask_of(65).unwrap()[1], 2);
        assert!(mask_of(MAX_NODES).is_none());
    }

    #[test]
    fn node_0_is_set_and_a_node_that_is_not_there_is_refused() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(1 << 20).unwrap();
        let mapping = Mapping::new(&file, 1 << 20, page_bytes()).unwrap();
        for numa in [Numa::Default, Numa::Interleave, Numa::Node(0)] {
            match apply(numa, &mapping) {
                Ok(()) => {}
                Err(error) if matches!(error.raw_os_error(), Some(libc::EPERM | libc::ENOSYS)) => {
                    eprintln!("skipped: {error}");
                    return;
                }
                Err(error) => panic!("{numa:?}: {error}"),
            }
        }
        assert_eq!(
            apply(Numa::Node(MAX_NODES - 1), &mapping).unwrap_err().raw_os_error(),
            Some(libc::EINVAL)
        );
        assert_eq!(
            apply(Numa::Node(MAX_NODES), &mapping).unwrap_err().raw_os_error(),
            Some(libc::EINVAL)
        );
    }
}
