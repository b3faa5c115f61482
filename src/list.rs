//! What an operator asks: which regions are there, in which state, and who holds them.
//!
//! Each file is judged by the probe that the constructors use, under the directory's lock; who holds it is then
//! looked up in one pass over /proc for all of them, without the lock. Nothing is changed and no byte is touched.

use std::ffi::{CStr, CString};
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, SystemTime};

use crate::directory::{Directory, Locked};
use crate::error::{Error, Result};
use crate::file::{Found, Probe};
use crate::holders::{FileIdentity, Holder, Survey};
use crate::mapping::page_bytes;
use crate::spec::EngineId;
use crate::wait::Waiter;

/// What a file in the directory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Somebody of ours holds it.
    Live,
    /// Its creator is still at work.
    BeingMade,
    /// Only processes of the original class hold it: it is open for writing, and nobody announces anything.
    Original,
    /// Nobody holds it, and that is proven.
    Orphan,
    /// No region file of this user: no constructor of theirs touches it.
    Foreign,
    /// It is held, and shorter than what is mapped: a touch behind its end is SIGBUS.
    Damaged,
    /// It could not be judged; it is treated as if somebody lived.
    Unclear,
}

impl State {
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::BeingMade => "being_made",
            Self::Original => "original",
            Self::Orphan => "orphan",
            Self::Foreign => "foreign",
            Self::Damaged => "damaged",
            Self::Unclear => "unclear",
        }
    }

    /// Does somebody have it open or mapped?
    #[must_use]
    pub fn is_held(self) -> bool {
        matches!(self, Self::Live | Self::BeingMade | Self::Original | Self::Damaged)
    }
}

/// One file of the directory.
#[derive(Debug, Clone)]
pub struct Entry {
    pub file_name: CString,
    pub state: State,
    /// Why, and what follows from it, in one line.
    pub reason: String,
    pub identity: FileIdentity,
    /// Announced by living holders of ours, as the block size.
    pub nonce: Option<u64>,
    pub block_size_bytes: Option<u64>,
    pub size_bytes: u64,
    /// What it takes in the filesystem.
    pub allocated_bytes: u64,
    /// Since it was made; where the filesystem does not tell that, since it got its size.
    pub age: Duration,
    pub uid: u32,
    /// Permission bits.
    pub mode: u32,
    /// By pid, as far as they can be seen from here.
    pub holders: Vec<Holder>,
    /// Holders that cannot be seen from here, at least; in other containers, mostly.
    pub unseen_holders: usize,
}

impl Entry {
    /// `None` for a name that holds no id: one that is no text, or a leftover that never got its name.
    #[must_use]
    pub fn id(&self) -> Option<EngineId> {
        EngineId::from_file_name(&self.file_name)
    }

    /// Blocks that the file has room for, where their size is known.
    #[must_use]
    pub fn num_blocks(&self) -> Option<u64> {
        self.size_bytes.checked_div(self.block_size_bytes?)
    }
}

/// What a look at a name came to. `found` holds the file open, so that its identity stays proof.
#[derive(Debug)]
pub(crate) struct Verdict {
    pub(crate) state: State,
    pub(crate) reason: String,
    pub(crate) found: Option<Found>,
}

/// Judges what stands at a name. `None` where nothing does.
pub(crate) fn judge(locked: &Locked<'_>, name: &CStr) -> Option<Verdict> {
    let verdict = |state, reason: &str, found| {
        Some(Verdict {
            state,
            reason: reason.to_owned(),
            found,
        })
    };
    match locked.probe(name) {
        Ok(Probe::Absent) => None,
        Ok(Probe::Changed) => verdict(State::Unclear, "the name kept changing hands", None),
        Ok(Probe::Locked) => verdict(
            State::Unclear,
            "a process that only reads it holds its lock: `lslocks` shows which",
            None,
        ),
        Ok(Probe::Dead { found, is_proven: true }) => verdict(
            State::Orphan,
            "nobody has it open: the next constructor of its user removes it",
            Some(found),
        ),
        Ok(Probe::Dead { found, .. }) => verdict(
            State::Unclear,
            "nobody is seen here, but this system has no leases to prove that other containers do not use it",
            Some(found),
        ),
        Ok(Probe::Live(found)) => {
            let (state, reason) = judge_live(&found);
            verdict(state, &reason, Some(found))
        }
        Err(Error::Foreign { reason, .. }) => verdict(State::Foreign, &reason, None),
        Err(error) => verdict(State::Unclear, &error.to_string(), None),
    }
}

fn judge_live(found: &Found) -> (State, String) {
    let size_bytes = found.size_bytes;
    if let Some(block_size_bytes) = found.announced_block_size()
        && (size_bytes == 0 || size_bytes.checked_rem(block_size_bytes) != Some(0))
    {
        let reason = format!(
            "{size_bytes} bytes are no whole blocks of {block_size_bytes}: the file was shortened, and a touch behind its end is a bus error"
        );
        return (State::Damaged, reason);
    }
    if found.is_being_prepared() {
        let done_bytes = found.allocated_bytes.min(size_bytes);
        let reason = format!("its creator is at work: {done_bytes} of {size_bytes} bytes are backed");
        return (State::BeingMade, reason);
    }
    if found.announced_block_size().is_none() && !found.is_locked() {
        if size_bytes == 0 {
            let reason = "a process of the original class has made it and not sized it yet";
            return (State::BeingMade, reason.to_owned());
        }
        let reason = "a process has it open for writing and announces nothing, as the original class does";
        return (State::Original, reason.to_owned());
    }
    let reason = if found.allocated_bytes < size_bytes {
        let backed_bytes = found.allocated_bytes;
        format!(
            "processes hold it; only {backed_bytes} of {size_bytes} bytes are backed, the first use by a joiner backs the rest"
        )
    } else {
        String::from("processes hold it")
    };
    (State::Live, reason)
}

/// Every region file of the directory, by name.
///
/// # Errors
/// What ends the wait for the directory's lock.
pub fn list(directory: &Directory, waiter: &mut Waiter<'_, '_>) -> Result<Vec<Entry>> {
    let mut names = directory.names();
    names.sort();
    look_at(directory, &names, waiter)
}

/// The region of one id. `None` where there is none.
///
/// # Errors
/// As [`list`].
pub fn inspect(directory: &Directory, id: &EngineId, waiter: &mut Waiter<'_, '_>) -> Result<Option<Entry>> {
    Ok(look_at(directory, &[id.file_name_c()], waiter)?.pop())
}

fn look_at(directory: &Directory, names: &[CString], waiter: &mut Waiter<'_, '_>) -> Result<Vec<Entry>> {
    let mut entries = Vec::new();
    for name in names {
        entries.extend(look(directory, name, waiter)?);
    }
    let survey = Survey::of(&entries.iter().map(|entry| entry.identity).collect());
    let mut seen = Vec::new();
    for mut entry in entries {
        add_holders(&mut entry, &survey);
        // Held, and by nobody: its last holder went between the two looks, or lives where we cannot see it.
        if entry.state.is_held() && entry.holders.is_empty() {
            let Some(again) = look(directory, &entry.file_name, waiter)? else {
                continue;
            };
            entry = again;
            add_holders(&mut entry, &survey);
            entry.unseen_holders = entry.unseen_holders.max(usize::from(entry.state.is_held()));
        }
        seen.push(entry);
    }
    Ok(seen)
}

fn look(directory: &Directory, name: &CStr, waiter: &mut Waiter<'_, '_>) -> Result<Option<Entry>> {
    waiter.checkpoint()?;
    // One hold of the lock for each file: a long list must not keep constructors waiting.
    let locked = directory.lock(waiter)?;
    let Ok(meta) = std::fs::symlink_metadata(directory.join(name)) else {
        return Ok(None);
    };
    let Some(Verdict { state, reason, found }) = judge(&locked, name) else {
        return Ok(None);
    };
    drop(locked);
    let identity = FileIdentity {
        device: meta.dev(),
        inode: meta.ino(),
    };
    let (state, reason) = match &found {
        // The original class takes no lock.
        Some(found) if found.identity() != identity => (State::Unclear, String::from("the name kept changing hands")),
        _ => (state, reason),
    };
    let since = meta.created().or_else(|_| meta.modified()).ok();
    Ok(Some(Entry {
        file_name: name.to_owned(),
        state,
        reason,
        identity,
        nonce: found.as_ref().and_then(Found::announced_nonce),
        block_size_bytes: found.as_ref().and_then(Found::announced_block_size),
        // A link or a directory has no bytes of a region.
        size_bytes: if meta.is_file() { meta.len() } else { 0 },
        allocated_bytes: meta.blocks().saturating_mul(512),
        age: since
            .and_then(|since| SystemTime::now().duration_since(since).ok())
            .unwrap_or_default(),
        uid: meta.uid(),
        mode: meta.mode() & 0o7777,
        holders: Vec::new(),
        unseen_holders: 0,
    }))
}

fn add_holders(entry: &mut Entry, survey: &Survey) {
    entry.holders = survey.holders(entry.identity).to_vec();
    entry.unseen_holders = survey.unseen(entry.identity);
    let end_bytes = entry.size_bytes.next_multiple_of(page_bytes() as u64);
    let farthest = entry.holders.iter().max_by_key(|holder| holder.mapped_bytes);
    if let Some(holder) = farthest.filter(|holder| entry.state.is_held() && holder.mapped_bytes > end_bytes) {
        entry.state = State::Damaged;
        entry.reason = format!(
            "process {} has {} bytes mapped and the file has {}: it was shortened, and a touch behind its end is a bus error",
            holder.pid, holder.mapped_bytes, entry.size_bytes
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::publish::tests::shape;
    use crate::wait::never_stop;
    use std::fs::{File, Permissions};
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    const NAME: &str = "vllm_ec_a.mmap";

    /// A directory of its own, and what a listing of it gives: one file's state and the whole entry.
    struct World {
        temp: tempfile::TempDir,
        directory: Directory,
    }

    impl World {
        fn new() -> Self {
            let temp = tempfile::tempdir_in("/dev/shm").unwrap();
            let directory = Directory::open(temp.path()).unwrap();
            Self { temp, directory }
        }

        fn path(&self) -> std::path::PathBuf {
            self.temp.path().join(NAME)
        }

        fn list(&self) -> Vec<Entry> {
            let mut go_on = never_stop();
            list(&self.directory, &mut Waiter::new(Duration::from_secs(5), &mut go_on)).unwrap()
        }

        fn only(&self) -> Entry {
            let [entry] = <[Entry; 1]>::try_from(self.list()).unwrap();
            entry
        }
    }

    /// As the original class makes it: no lock, mode 0600.
    fn make(path: &Path, size_bytes: u64) -> File {
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)
            .unwrap();
        file.set_permissions(Permissions::from_mode(0o600)).unwrap();
        file.set_len(size_bytes).unwrap();
        file
    }

    #[test]
    fn a_region_is_being_made_then_live_then_an_orphan() {
        let world = World::new();
        let mut go_on = never_stop();
        let mut waiter = Waiter::new(Duration::from_secs(5), &mut go_on);
        let locked = world.directory.lock(&mut waiter).unwrap();
        let made = locked.publish(c"vllm_ec_a.mmap", shape(4, 1024)).unwrap().unwrap();
        drop(locked);
        let entry = world.only();
        assert_eq!(entry.state, State::BeingMade, "{}", entry.reason);
        drop(made.preparing);
        let entry = world.only();
        assert_eq!(entry.state, State::Live);
        assert_eq!((entry.num_blocks(), entry.block_size_bytes), (Some(4), Some(1024)));
        assert_eq!((entry.size_bytes, entry.allocated_bytes), (4096, 0));
        assert!(
            entry.reason.contains("only 0 of 4096 bytes are backed"),
            "{}",
            entry.reason
        );
        assert!(entry.nonce.is_some());
        assert_eq!(
            entry.holders.iter().map(|holder| holder.pid).collect::<Vec<_>>(),
            [std::process::id()]
        );
        assert_eq!(entry.unseen_holders, 0);
        assert_eq!(entry.id(), Some(EngineId::new("a").unwrap()));
        drop(made.file);
        let entry = world.only();
        assert_eq!(entry.state, State::Orphan, "{}", entry.reason);
        assert_eq!((entry.num_blocks(), entry.nonce, entry.holders.len()), (None, None, 0));
    }

    #[test]
    fn a_file_of_the_original_class() {
        let world = World::new();
        let file = make(&world.path(), 0);
        assert_eq!(world.only().state, State::BeingMade);
        file.set_len(8192).unwrap();
        let entry = world.only();
        assert_eq!((entry.state, entry.block_size_bytes), (State::Original, None));
        let mapped = memmap2::MmapOptions::new().len(8192).map_raw(&file).unwrap();
        drop(file);
        let entry = world.only();
        assert_eq!(
            (entry.state, entry.holders.len()),
            (State::Original, 1),
            "a mapping is enough"
        );
        drop(mapped);
        assert_eq!(world.only().state, State::Orphan);
    }

    #[test]
    fn a_file_that_was_shortened_under_its_holders_is_damaged() {
        let world = World::new();
        let mut go_on = never_stop();
        let locked = world
            .directory
            .lock(&mut Waiter::new(Duration::from_secs(5), &mut go_on));
        let made = locked
            .unwrap()
            .publish(c"vllm_ec_a.mmap", shape(4, 4096))
            .unwrap()
            .unwrap();
        drop(made.preparing);
        let file = made.file.file();
        file.set_len(4097).unwrap();
        let entry = world.only();
        assert_eq!(entry.state, State::Damaged);
        assert!(
            entry.reason.contains("4097 bytes are no whole blocks of 4096"),
            "{}",
            entry.reason
        );
        file.set_len(0).unwrap();
        assert_eq!(world.only().state, State::Damaged);
        // A multiple of the block size is told by what is mapped.
        file.set_len(4 * 4096).unwrap();
        let mapped = memmap2::MmapOptions::new().len(4 * 4096).map_raw(file).unwrap();
        assert_eq!(world.only().state, State::Live);
        file.set_len(2 * 4096).unwrap();
        let entry = world.only();
        let page = page_bytes() as u64;
        if page > 4096 {
            return; // the mapping's last page has the file's end in it
        }
        assert_eq!(entry.state, State::Damaged);
        assert!(
            entry.reason.contains("16384 bytes mapped and the file has 8192"),
            "{}",
            entry.reason
        );
        drop(mapped);
    }

    #[test]
    fn what_is_no_region_of_this_user_is_foreign_and_not_opened() {
        let world = World::new();
        std::os::unix::fs::symlink("/nonexistent", world.path()).unwrap();
        let entry = world.only();
        assert_eq!(
            (entry.state, entry.reason.as_str()),
            (State::Foreign, "it is a symbolic link")
        );
        std::fs::remove_file(world.path()).unwrap();
        nix::unistd::mkfifo(&world.path(), nix::sys::stat::Mode::S_IRUSR).unwrap();
        assert_eq!(world.only().state, State::Foreign);
        std::fs::remove_file(world.path()).unwrap();
        let file = make(&world.path(), 4096);
        file.set_permissions(Permissions::from_mode(0o644)).unwrap();
        let entry = world.only();
        assert_eq!((entry.state, entry.mode), (State::Foreign, 0o644));
        assert_eq!(entry.holders.len(), 1, "who holds it is told all the same");
    }

    #[test]
    fn a_lock_of_somebody_who_only_reads_proves_nothing() {
        let world = World::new();
        drop(make(&world.path(), 4096));
        let reader = File::open(world.path()).unwrap();
        assert!(crate::lock::hold_shared(&reader).unwrap());
        assert_eq!(world.only().state, State::Unclear);
        drop(reader);
        assert_eq!(world.only().state, State::Orphan);
    }

    #[test]
    fn names_of_the_scheme_are_listed_in_order_and_no_others() {
        let world = World::new();
        for name in [
            "vllm_ec_b.mmap",
            "vllm_ec_a.mmap",
            ".vllm_ec_unnamed_1_2",
            "vllm_ec_c",
            "other.mmap",
        ] {
            drop(make(&world.temp.path().join(name), 1));
        }
        let entries = world.list();
        let ids: Vec<_> = entries
            .iter()
            .map(|entry| entry.id().map(|id| id.as_str().to_owned()))
            .collect();
        assert_eq!(ids, [None, Some("a".to_owned()), Some("b".to_owned())]);
        let mut go_on = never_stop();
        let mut waiter = Waiter::new(Duration::from_secs(5), &mut go_on);
        let one = inspect(&world.directory, &EngineId::new("b").unwrap(), &mut waiter).unwrap();
        assert_eq!(one.unwrap().file_name.as_c_str(), c"vllm_ec_b.mmap");
        let none = inspect(&world.directory, &EngineId::new("c").unwrap(), &mut waiter).unwrap();
        assert!(none.is_none());
    }
}
