//! Field cases (`docs/field-cases.md`) that only a Rust program can show: other page sizes, other devices,
//! and what one process sees of another's stores. A comment names the case.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)] // a test fails by panicking
#![allow(unsafe_code)] // reads and writes bytes of the mapping, as a user of the raw pointer does

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use ec_shared_region::mapping::{Mapping, page_bytes};
use ec_shared_region::pin::{HostRegistrar, Refusal};
use ec_shared_region::region::PinError;
use ec_shared_region::wait::never_stop;
use ec_shared_region::{EngineId, Geometry, Region, Role, Spec};

fn open(directory: &Path, blocks: u64, size: u64) -> Region {
    let spec = Spec::new(EngineId::new("a").unwrap(), Geometry::new(blocks, size).unwrap());
    Region::open_in(directory, &spec, &mut never_stop()).unwrap().0
}

/// AT-17: the region has no flag of its own. Whoever publishes a block by a release store of theirs, or by a message,
/// and whoever reads it after the matching acquire, sees every byte, though each has a mapping of its own.
#[test]
fn a_block_is_whole_for_whoever_acquires_what_its_writer_released() {
    const BLOCK: usize = 7168;
    let shm = tempfile::tempdir_in("/dev/shm").unwrap();
    let (writer, reader) = (open(shm.path(), 4, BLOCK as u64), open(shm.path(), 4, BLOCK as u64));
    assert_eq!((writer.role(), reader.role()), (Role::Creator, Role::Joiner));
    let (to, from) = (
        Arc::clone(writer.mapping().unwrap()),
        Arc::clone(reader.mapping().unwrap()),
    );
    assert_ne!(to.as_ptr(), from.as_ptr());
    let (ready, seen) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..=100_usize {
                // SAFETY: the last block of the mapping; the reader looks only after `ready`.
                unsafe { to.as_ptr().add(3 * BLOCK).write_bytes(round as u8, BLOCK) };
                ready.store(round, Ordering::Release);
                while seen.load(Ordering::Acquire) < round {
                    std::hint::spin_loop();
                }
            }
        });
        for round in 1..=100_usize {
            while ready.load(Ordering::Acquire) < round {
                std::hint::spin_loop();
            }
            // SAFETY: as above; the writer waits for `seen`.
            let wrong = (0..BLOCK).filter(|&at| unsafe { from.as_ptr().add(3 * BLOCK + at).read() } != round as u8);
            let wrong = wrong.count();
            seen.store(round, Ordering::Release);
            assert_eq!(wrong, 0, "round {round}");
        }
    });
}

/// PI-49: the stride of the touch is the page size that it is given, not a constant of 4096.
#[test]
fn a_touch_goes_from_page_to_page_of_the_size_that_it_is_given() {
    let page = page_bytes();
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    let total = 64 * page;
    file.set_len(total as u64).unwrap();
    let mapping = Mapping::new(&file, total, 4096).unwrap();
    let backed = |file: &File| file.metadata().unwrap().blocks() * 512 / page as u64;
    mapping.touch_write(0..total, 16 * page);
    assert_eq!(backed(&file), 4, "one page in sixteen");
    mapping.touch_write(0..total, page);
    assert_eq!(backed(&file), 64);
}

/// A device that is not CUDA, as a port to another one would bring it.
struct Npu {
    calls: Arc<Mutex<Vec<String>>>,
    takes_bytes: usize,
}

impl HostRegistrar for Npu {
    fn register(&self, _: usize, len_bytes: usize) -> Result<(), Refusal> {
        self.calls.lock().unwrap().push(format!("register {len_bytes}"));
        if len_bytes <= self.takes_bytes {
            return Ok(());
        }
        Err(Refusal {
            call: "npuHostRegister",
            code: 1,
            name: String::from("npuErrorTooLarge"),
            text: String::new(),
        })
    }

    fn unregister(&self, _: usize) -> Result<(), Refusal> {
        self.calls.lock().unwrap().push(String::from("unregister"));
        Ok(())
    }

    fn backend(&self) -> &'static str {
        "npu"
    }

    fn library_path(&self) -> Option<PathBuf> {
        None
    }
}

/// PI-43, MN-07: the device is a trait; another one gets the same plan, with smaller pieces where it refuses large ones.
#[test]
fn another_device_is_pinned_by_the_same_plan() {
    let shm = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut region = open(shm.path(), 8, 1 << 20);
    let calls = Arc::<Mutex<Vec<String>>>::default();
    let npu = |takes_bytes| {
        Box::new(Npu {
            calls: Arc::clone(&calls),
            takes_bytes,
        })
    };
    let report = region.pin(npu(2 << 20), usize::MAX).unwrap().unwrap();
    assert_eq!((report.backend, report.pieces), ("npu", 4));
    assert!(region.is_pinned());
    assert!(region.unpin().unwrap());
    assert_eq!(
        calls
            .lock()
            .unwrap()
            .iter()
            .filter(|call| *call == "unregister")
            .count(),
        4
    );
    match region.pin(npu(0), usize::MAX) {
        Err(PinError::Refused(refused, _)) => assert_eq!(refused.refusal.name, "npuErrorTooLarge"),
        other => panic!("{other:?}"),
    }
    assert!(!region.is_pinned());
}
