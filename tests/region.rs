//! The region as a Rust program sees it: roles, geometry, life and death, with neither Python nor CUDA.
//! Each test has a directory of its own in /dev/shm, which is gone at the end.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)] // a test fails by panicking
#![allow(unsafe_code)] // reads and writes bytes of the mapping, as a user of the raw pointer does

use std::fs::{self, File};
use std::ops::ControlFlow;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use ec_shared_region::error::{FoundGeometry, WaitState};
use ec_shared_region::wait::never_stop;
use ec_shared_region::{EngineId, Error, Geometry, Mode, OpenReport, Populate, Region, Role, Spec};

struct Shm(tempfile::TempDir);

impl Shm {
    fn new() -> Self {
        Self(tempfile::tempdir_in("/dev/shm").unwrap())
    }

    fn file(&self, id: &str) -> PathBuf {
        self.0.path().join(format!("vllm_ec_{id}.mmap"))
    }

    fn try_open(&self, spec: &Spec) -> Result<(Region, OpenReport), Error> {
        Region::open_in(self.0.path(), spec, &mut never_stop())
    }

    fn open(&self, spec: &Spec) -> Region {
        self.try_open(spec).unwrap().0
    }

    fn count(&self) -> usize {
        fs::read_dir(self.0.path()).unwrap().count()
    }

    /// What a process of the original class does first: an exclusive create in place.
    fn original_creates(&self, id: &str) -> File {
        File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(self.file(id))
            .unwrap()
    }
}

fn spec(id: &str, blocks: u64, size: u64) -> Spec {
    Spec {
        timeout: Duration::from_secs(20),
        ..Spec::new(EngineId::new(id).unwrap(), Geometry::new(blocks, size).unwrap())
    }
}

fn bytes(region: &Region) -> *mut u8 {
    region.mapping().unwrap().as_ptr()
}

fn read(region: &Region, offset: usize) -> u8 {
    assert!(offset < region.geometry().total_bytes());
    // SAFETY: within the mapping; no other thread of the test writes now.
    unsafe { bytes(region).add(offset).read_volatile() }
}

fn write(region: &Region, offset: usize, value: u8) {
    assert!(offset < region.geometry().total_bytes());
    // SAFETY: as in `read`.
    unsafe { bytes(region).add(offset).write_volatile(value) }
}

#[test]
fn the_first_creates_the_second_joins_and_both_see_the_same_bytes() {
    let shm = Shm::new();
    let spec = spec("a", 100, 7168);
    let mut creator = shm.open(&spec);
    let mut joiner = shm.open(&spec);
    assert_eq!((creator.role(), joiner.role()), (Role::Creator, Role::Joiner));
    write(&creator, 99 * 7168 + 5, 42);
    assert_eq!(read(&joiner, 99 * 7168 + 5), 42);
    let meta = shm.file("a").metadata().unwrap();
    assert_eq!(meta.len(), 100 * 7168);
    assert_eq!(meta.permissions().mode() & 0o7777, 0o600);
    joiner.close();
    assert!(shm.file("a").exists());
    creator.close();
    assert_eq!(shm.count(), 0);
    creator.close();
}

#[test]
fn every_page_is_backed_whoever_prefaults() {
    let shm = Shm::new();
    for populate in [Populate::Create, Populate::Join, Populate::Never] {
        let spec = Spec {
            populate,
            ..spec("a", 333, 7168)
        };
        let _creator = shm.open(&spec);
        let _joiner = shm.open(&spec);
        assert!(
            shm.file("a").metadata().unwrap().blocks() * 512 >= 333 * 7168,
            "{populate:?}"
        );
    }
}

#[test]
fn the_same_total_with_another_shape_is_refused_and_nothing_changes() {
    let shm = Shm::new();
    let creator = shm.open(&spec("a", 8, 64));
    write(&creator, 0, 7);
    for (blocks, size, announced) in [(4, 128, 64), (8, 32, 64), (16, 64, 64)] {
        match shm.try_open(&spec("a", blocks, size)) {
            Err(Error::GeometryMismatch {
                found:
                    FoundGeometry::Announced {
                        size_bytes: 512,
                        block_size_bytes,
                    },
                ..
            }) => assert_eq!(block_size_bytes, announced),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(read(&creator, 0), 7);
    assert_eq!(shm.file("a").metadata().unwrap().len(), 512);
}

#[test]
fn a_dead_file_of_any_size_is_replaced_by_zeroes() {
    let shm = Shm::new();
    for size in [0, 1, 511, 512, 513, 1 << 20] {
        fs::write(shm.file("a"), vec![0x4f; size]).unwrap();
        fs::set_permissions(shm.file("a"), fs::Permissions::from_mode(0o600)).unwrap();
        let (region, report) = shm.try_open(&spec("a", 8, 64)).unwrap();
        assert_eq!(region.role(), Role::Creator);
        assert!((0..512).all(|offset| read(&region, offset) == 0), "size {size}");
        assert_eq!(report.reclaimed.len(), 1);
    }
    assert_eq!(shm.count(), 0);
}

#[test]
fn the_dead_of_other_ids_are_reclaimed_and_the_living_are_not() {
    let shm = Shm::new();
    let living = shm.open(&spec("living", 8, 64));
    write(&living, 3, 9);
    let original = shm.original_creates("original");
    for id in ["dead1", "dead2", "dead3"] {
        drop(shm.original_creates(id));
    }
    fs::write(shm.0.path().join("not_a_region"), b"x").unwrap();
    let (_region, report) = shm.try_open(&spec("new", 8, 64)).unwrap();
    let mut reclaimed: Vec<_> = report.reclaimed.iter().map(|file| file.file_name.as_str()).collect();
    reclaimed.sort_unstable();
    assert_eq!(
        reclaimed,
        ["vllm_ec_dead1.mmap", "vllm_ec_dead2.mmap", "vllm_ec_dead3.mmap"]
    );
    assert_eq!(shm.count(), 4); // living, original, new, not_a_region
    assert_eq!(read(&living, 3), 9);
    drop(original);
}

#[test]
fn create_refuses_a_live_region_and_replaces_a_dead_one() {
    let shm = Shm::new();
    let create = Spec {
        mode: Mode::Create,
        ..spec("a", 8, 64)
    };
    let living = shm.open(&create);
    assert!(matches!(
        shm.try_open(&create),
        Err(Error::Exists { size_bytes: 512, .. })
    ));
    drop(living);
    drop(shm.original_creates("a"));
    assert_eq!(shm.open(&create).role(), Role::Creator);
}

#[test]
fn join_never_creates() {
    let shm = Shm::new();
    let join = Spec {
        mode: Mode::Join,
        timeout: Duration::from_millis(50),
        ..spec("a", 8, 64)
    };
    assert!(matches!(
        shm.try_open(&join),
        Err(Error::Timeout {
            state: WaitState::NoFile { wanted_bytes: 512 },
            ..
        })
    ));
    assert_eq!(shm.count(), 0);
    drop(shm.original_creates("a"));
    assert!(matches!(
        shm.try_open(&join),
        Err(Error::Timeout {
            state: WaitState::DeadFile { seen_bytes: 0, .. },
            ..
        })
    ));
    assert_eq!(shm.count(), 1);
    let _creator = shm.open(&spec("a", 8, 64));
    assert_eq!(shm.open(&join).role(), Role::Joiner);
}

#[test]
fn a_live_file_of_the_original_is_joined_once_it_has_its_size() {
    let shm = Shm::new();
    let original = shm.original_creates("a");
    let opened = std::thread::scope(|scope| {
        let joiner = scope.spawn(|| shm.open(&spec("a", 8, 64)));
        std::thread::sleep(Duration::from_millis(50)); // the pause between make and size
        original.set_len(512).unwrap();
        joiner.join().unwrap()
    });
    assert_eq!(opened.role(), Role::Joiner);
    assert_eq!(
        opened.file().unwrap().metadata().unwrap().ino(),
        original.metadata().unwrap().ino()
    );
    // Nobody had touched it: the joiner reserved the bytes, so that no touch can be SIGBUS.
    assert_eq!(original.metadata().unwrap().blocks() * 512, page());
    drop(opened);
    assert!(shm.file("a").exists(), "the original still holds it");
}

fn page() -> u64 {
    ec_shared_region::mapping::page_bytes() as u64
}

#[test]
fn an_original_that_dies_before_it_sizes_its_file_is_replaced_at_once() {
    let shm = Shm::new();
    let original = shm.original_creates("a");
    let began = Instant::now();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| shm.open(&spec("a", 8, 64)));
        std::thread::sleep(Duration::from_millis(30));
        drop(original);
        assert_eq!(waiter.join().unwrap().role(), Role::Creator);
    });
    assert!(began.elapsed() < Duration::from_secs(10), "it waited for the time-out");
}

#[test]
fn a_live_file_of_the_original_with_another_total_is_not_mapped() {
    let shm = Shm::new();
    let original = shm.original_creates("a");
    original.set_len(1024).unwrap();
    assert!(matches!(
        shm.try_open(&spec("a", 8, 64)),
        Err(Error::GeometryMismatch {
            found: FoundGeometry::SizeOnly { size_bytes: 1024 },
            ..
        })
    ));
    original.set_len(100).unwrap();
    let soon = Spec {
        timeout: Duration::from_millis(50),
        ..spec("a", 8, 64)
    };
    assert!(matches!(
        shm.try_open(&soon),
        Err(Error::Timeout {
            state: WaitState::NotSized { seen_bytes: 100, .. },
            ..
        })
    ));
    assert_eq!(original.metadata().unwrap().len(), 100);
}

#[test]
fn the_last_one_out_takes_the_name_of_a_dead_creator() {
    let shm = Shm::new();
    let original = shm.original_creates("a"); // leaves its file behind, as if it were killed
    original.set_len(512).unwrap();
    let first = shm.open(&spec("a", 8, 64));
    let second = shm.open(&spec("a", 8, 64));
    drop(original);
    drop(first);
    assert!(shm.file("a").exists());
    drop(second);
    assert_eq!(shm.count(), 0);
}

#[test]
fn a_late_creator_does_not_remove_its_successor() {
    let shm = Shm::new();
    let mut late = shm.open(&spec("a", 8, 64));
    fs::remove_file(shm.file("a")).unwrap(); // by a person, or by a clean-up daemon
    let successor = shm.open(&spec("a", 4, 128));
    assert_eq!(successor.role(), Role::Creator);
    late.close();
    assert!(shm.file("a").exists());
}

// ST-04
#[test]
fn a_name_that_is_released_early_leaves_the_holders_and_a_successor_alone() {
    let shm = Shm::new();
    let mut creator = shm.open(&spec("a", 2, 4096));
    let joiner = shm.open(&spec("a", 2, 4096));
    assert!(!joiner.release_name().unwrap(), "a joiner changes nothing");
    assert!(shm.file("a").exists());
    assert!(creator.release_name().unwrap());
    assert!(!shm.file("a").exists());
    assert!(!creator.release_name().unwrap(), "it is gone already");
    write(&creator, 4097, 7);
    assert_eq!(read(&joiner, 4097), 7);
    let mut successor = shm.open(&spec("a", 3, 4096));
    assert_eq!((successor.role(), read(&successor, 4097)), (Role::Creator, 0));
    assert!(!creator.release_name().unwrap(), "the name stands for another file");
    creator.close();
    drop(joiner);
    let inode = successor.file().unwrap().metadata().unwrap().ino();
    assert_eq!(shm.file("a").metadata().unwrap().ino(), inode);
    successor.close();
    assert!(!shm.file("a").exists());
    assert!(matches!(successor.release_name(), Err(Error::Closed)));
}

#[test]
fn eight_threads_get_one_creator_and_one_file() {
    let shm = Shm::new();
    for _ in 0..50 {
        let barrier = Barrier::new(8);
        let regions: Vec<Region> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| {
                        barrier.wait();
                        shm.open(&spec("a", 64, 7168))
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(regions.iter().filter(|r| r.role() == Role::Creator).count(), 1);
        let inode = |region: &Region| region.file().unwrap().metadata().unwrap().ino();
        assert!(regions.iter().all(|region| inode(region) == inode(&regions[0])));
        drop(regions);
        assert_eq!(shm.count(), 0);
    }
}

#[test]
fn a_constructor_that_is_interrupted_leaves_nothing() {
    let shm = Shm::new();
    // Stop at every checkpoint in turn, until the constructor gets through.
    for steps in 0.. {
        let mut left = steps;
        let result = Region::open_in(shm.0.path(), &spec("a", 100, 7168), &mut || {
            if left == 0 {
                return ControlFlow::Break(());
            }
            left -= 1;
            ControlFlow::Continue(())
        });
        match result {
            Err(Error::Interrupted) => assert_eq!(shm.count(), 0, "after {steps} steps"),
            Ok(_) => break,
            Err(other) => panic!("{other}"),
        }
        assert!(steps < 1000);
    }
    assert_eq!(shm.count(), 0);
}

#[test]
fn views_outlive_the_region() {
    let shm = Shm::new();
    let mut region = shm.open(&spec("a", 8, 64));
    let view = Arc::clone(region.mapping().unwrap());
    write(&region, 511, 3);
    region.close();
    assert!(region.mapping().is_none() && region.file().is_none());
    // SAFETY: the view keeps the mapping.
    assert_eq!(unsafe { view.as_ptr().add(511).read_volatile() }, 3);
}

#[test]
fn a_missing_directory_is_named() {
    let error = Region::open_in(
        "/dev/shm/no/such/directory".as_ref(),
        &spec("a", 1, 1),
        &mut never_stop(),
    )
    .unwrap_err();
    assert_eq!(error.errno(), Some(2));
    assert!(error.to_string().contains("/dev/shm/no/such/directory"), "{error}");
    assert!(error.hint().unwrap().contains("mounted"));
}

#[test]
fn a_timeout_of_zero_still_replaces_the_dead() {
    let shm = Shm::new();
    drop(shm.original_creates("a"));
    drop(shm.original_creates("b"));
    let now = Spec {
        timeout: Duration::ZERO,
        ..spec("a", 8, 64)
    };
    assert_eq!(shm.open(&now).role(), Role::Creator);
    assert_eq!(shm.count(), 0);
}

#[test]
fn a_shared_lock_of_an_onlooker_does_not_bring_the_dead_back() {
    let shm = Shm::new();
    fs::write(shm.file("a"), [0x4f; 512]).unwrap();
    fs::set_permissions(shm.file("a"), fs::Permissions::from_mode(0o600)).unwrap();
    let onlooker = File::open(shm.file("a")).unwrap(); // as `flock -s` or a backup does
    let lock = nix::fcntl::Flock::lock(onlooker, nix::fcntl::FlockArg::LockSharedNonblock).unwrap();
    let soon = Spec {
        timeout: Duration::from_millis(50),
        ..spec("a", 8, 64)
    };
    match shm.try_open(&soon) {
        Ok((region, _)) => assert!((0..512).all(|offset| read(&region, offset) == 0), "dead bytes"),
        Err(error) => assert!(matches!(error, Error::Timeout { .. }), "{error}"),
    }
    drop(lock);
    assert_eq!(shm.open(&spec("a", 8, 64)).role(), Role::Creator);
}

#[test]
fn blocks_are_scattered_and_gathered_by_slices() {
    let shm = Shm::new();
    let region = shm.open(&spec("copies", 8, 7168));
    let other = shm.open(&spec("copies", 8, 7168));
    let src: Vec<u8> = (0..3 * 7168 - 100).map(|at| (at % 251) as u8).collect();
    region.scatter(&[6, 0, 7], &src, &mut never_stop()).unwrap();

    // Another mapping of the same bytes, in another order, the partial block included.
    let mut out = vec![9; 3 * 7168];
    other.gather(&[0, 6, 7], &mut out, &mut never_stop()).unwrap();
    assert_eq!(out[..7168], src[7168..2 * 7168]);
    assert_eq!(out[7168..2 * 7168], src[..7168]);
    assert_eq!(out[2 * 7168..3 * 7168 - 100], src[2 * 7168..]);
    assert_eq!(out[3 * 7168 - 100..], [0; 100]);

    let mut all = vec![0; 8 * 7168];
    other.gather(0..8, &mut all, &mut never_stop()).unwrap();
    assert!(all[7168..6 * 7168].iter().all(|&byte| byte == 0));
    assert_eq!(all[6 * 7168..7 * 7168], src[..7168]);
}

#[test]
fn a_copy_that_cannot_be_moves_nothing() {
    let shm = Shm::new();
    let mut region = shm.open(&spec("refused", 4, 64));
    let mut never = never_stop();
    let out_of_range = region.scatter(&[1, 4], &[7; 128], &mut never);
    assert!(
        matches!(out_of_range, Err(Error::BlockOutOfRange { position: 1, .. })),
        "{out_of_range:?}"
    );
    let twice = region.scatter(&[1, 1], &[7; 128], &mut never);
    assert!(matches!(twice, Err(Error::DuplicateBlock { id: 1, .. })), "{twice:?}");
    for len_bytes in [0, 64, 129] {
        let wrong = region.scatter(&[1, 2], &vec![7; len_bytes], &mut never);
        assert!(matches!(wrong, Err(Error::PartialBytes { .. })), "{wrong:?}");
    }
    let mut out = [9; 256];
    region.gather(0..4, &mut out, &mut never).unwrap();
    assert_eq!(out, [0; 256]);
    region.close();
    let closed = region.gather(0..4, &mut out, &mut never);
    assert!(matches!(closed, Err(Error::Closed)), "{closed:?}");
}

/// Opens a region, and others at the checkpoint at which the creator has published it and backed none of it.
fn open_with_early<T>(
    shm: &Shm,
    creator: &Spec,
    then: ControlFlow<()>,
    mut early: impl FnMut() -> T,
) -> (Result<(Region, OpenReport), Error>, T) {
    let mut came = None;
    let opened = Region::open_in(shm.0.path(), creator, &mut || {
        let is_published = came.is_none() && shm.file("a").exists();
        if is_published {
            came = Some(early());
            return then;
        }
        ControlFlow::Continue(())
    });
    (opened, came.unwrap())
}

fn is_being_prepared<T: std::fmt::Debug>(result: &Result<T, Error>) -> bool {
    matches!(
        result,
        Err(Error::Timeout {
            state: WaitState::BeingPrepared { wanted_bytes: 716_800 },
            ..
        })
    )
}

#[test]
fn a_joiner_comes_in_while_its_creator_prepares_and_waits_for_the_bytes() {
    let shm = Shm::new();
    let soon = Spec {
        timeout: Duration::from_millis(50),
        ..spec("a", 100, 7168)
    };
    let (creator, mut joiner) = open_with_early(&shm, &spec("a", 100, 7168), ControlFlow::Continue(()), || {
        let mut joiner = shm.open(&soon);
        assert_eq!((joiner.role(), joiner.is_ready()), (Role::Joiner, false));
        assert!(is_being_prepared(&joiner.wait_until_ready(&mut never_stop())));
        assert!(!joiner.is_ready());
        joiner
    });
    let (creator, _) = creator.unwrap();
    assert!(creator.is_ready());
    joiner.wait_until_ready(&mut never_stop()).unwrap();
    assert!(joiner.is_ready());
    write(&creator, 0, 5);
    assert_eq!(read(&joiner, 0), 5);
    drop(joiner);
    drop(creator);
    assert_eq!(shm.count(), 0);
}

#[test]
fn a_joiner_that_maps_ahead_waits_outside() {
    let shm = Shm::new();
    let soon = Spec {
        timeout: Duration::from_millis(50),
        populate: Populate::Join,
        ..spec("a", 100, 7168)
    };
    let (creator, refused) = open_with_early(&shm, &spec("a", 100, 7168), ControlFlow::Continue(()), || {
        shm.try_open(&soon)
    });
    assert!(is_being_prepared(&refused), "{refused:?}");
    let _creator = creator.unwrap();
    assert!(shm.open(&soon).is_ready());
}

#[test]
fn a_joiner_backs_what_a_creator_that_gave_up_did_not() {
    let shm = Shm::new();
    let spec = spec("a", 100, 7168);
    let allocated = || shm.file("a").metadata().unwrap().blocks() * 512;
    let (creator, mut joiner) = open_with_early(&shm, &spec, ControlFlow::Break(()), || shm.open(&spec));
    assert!(matches!(creator, Err(Error::Interrupted)), "{creator:?}");
    assert!(!joiner.is_ready());
    assert_eq!(allocated(), 0, "the creator was interrupted before it backed anything");
    joiner.wait_until_ready(&mut never_stop()).unwrap();
    assert!(allocated() >= 100 * 7168);
    assert_eq!(shm.open(&spec).role(), Role::Joiner);
    drop(joiner);
    assert_eq!(shm.count(), 0);
}
