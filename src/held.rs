//! Descriptors that are held for as long as a region. A process that closes all its descriptors, as daemons do when they
//! start, closes these too, and their numbers then belong to somebody else's files: such a number must neither be
//! used nor closed.

#![allow(unsafe_code)] // `ManuallyDrop::drop`: closing is what is left undone where the number is another's

use std::io;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use nix::errno::Errno;

use crate::file::{identity, stat_of};
use crate::holders::FileIdentity;

/// An open file, with what it takes to see whether its number still stands for it.
#[derive(Debug)]
pub struct Held<File: AsFd> {
    file: ManuallyDrop<File>,
    /// `None` where the system did not say: then the number is taken to be ours.
    identity: Option<FileIdentity>,
}

impl<File: AsFd> Held<File> {
    pub fn known(file: File, identity: Option<FileIdentity>) -> Self {
        Self {
            file: ManuallyDrop::new(file),
            identity,
        }
    }

    /// Of the file that was opened, whatever the number stands for now.
    pub fn identity(&self) -> Option<FileIdentity> {
        self.identity
    }

    /// # Errors
    /// `EBADF` where the number stands for nothing, or for another file; another error of `fstat(2)`.
    pub fn must_be_ours(&self) -> io::Result<()> {
        let stat = stat_of(self.file.as_fd().as_raw_fd())?;
        match self.identity {
            Some(ours) if ours != identity(&stat) => Err(Errno::EBADF.into()),
            Some(_) | None => Ok(()),
        }
    }

    /// Has somebody else closed it?
    pub fn is_lost(&self) -> bool {
        self.must_be_ours()
            .is_err_and(|error| error.raw_os_error() == Some(Errno::EBADF as i32))
    }
}

impl<File: AsFd> Drop for Held<File> {
    fn drop(&mut self) {
        if !self.is_lost() {
            // SAFETY: dropped here and nowhere else, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.file) };
        }
    }
}

impl<File: AsFd> Deref for Held<File> {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

impl<File: AsFd> AsFd for Held<File> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::IntoRawFd;

    #[test]
    fn a_number_that_became_another_files_is_left_to_it() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let create = |name| File::create(directory.path().join(name)).unwrap();
        let number = create("ours").into_raw_fd();
        // SAFETY: the number is open, and `held` is its owner from here on.
        let file = unsafe { <File as std::os::fd::FromRawFd>::from_raw_fd(number) };
        let held = Held::known(file, stat_of(number).ok().map(|stat| identity(&stat)));
        assert!(held.must_be_ours().is_ok());

        let other = create("other");
        // SAFETY: takes two open numbers; the first stands for the second's file from now on.
        assert_eq!(unsafe { nix::libc::dup2(other.as_raw_fd(), number) }, number);
        assert_eq!(held.must_be_ours().unwrap_err().raw_os_error(), Some(nix::libc::EBADF));
        assert!(held.is_lost());
        drop(held);
        assert!(stat_of(number).is_ok(), "closed somebody else's file");
        // SAFETY: nobody owns the number any more.
        unsafe { nix::libc::close(number) };
    }
}
