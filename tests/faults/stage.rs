//! One role at a time: a worker to which things happen, and what must hold after each.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::libc::{self, EINTR};

use crate::common::Shm;
use crate::common::process::{Event, PATIENCE, Process};
use crate::table::{Outcome, Row, Times};

const ID: &str = "a";
const NEIGHBOUR: &str = "neighbour";
const BLOCK_BYTES: usize = 7168;
/// What those who live have written.
const KEPT: u8 = 0xb5;
/// The victim's timeout, in milliseconds.
const TIMEOUT: u32 = 60;
/// Past its timeout an operation may still wait a second for the directory's lock, to take a name away.
const DEADLINE: Duration = Duration::from_millis(2500);
/// For one who joins after an injected failure.
const JOIN_PATIENCE_MS: u32 = 900;
const SOON: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Before {
    Nothing,
    /// A dead file of the same id, and a smaller one: it passes for nobody's finished region.
    Dead,
    DeadOthers,
    /// A live creator of ours.
    Creator,
    /// A live process of the original class, which has touched nothing.
    Original,
    /// One that dies when the victim has joined.
    LeavingOriginal,
    /// A creator of ours that has backed nothing when the victim joins, and is then interrupted.
    AbandoningCreator,
}

/// What the victim does while calls fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Open,
    /// Waits until every byte is backed.
    GetReady,
    Close,
}

#[derive(Debug)]
pub struct Role {
    pub name: &'static str,
    pub before: Before,
    pub operation: Operation,
    /// Its last block ends within a page.
    pub blocks: usize,
    /// What the victim asks for besides.
    pub options: &'static str,
    /// What fails in any case: `call/nth/for_ever/errno`.
    pub base: &'static str,
    /// The calls that fail in turn, if not all.
    pub only: &'static [&'static str],
    /// Is the victim told that the mount gives huge pages?
    pub has_huge_mount: bool,
}

impl Role {
    /// Which of so many calls fail in turn: all; where each case looks through all of /proc, which takes its time,
    /// only the last, when it has looked.
    pub fn which(&self, times: usize) -> std::ops::RangeInclusive<usize> {
        let first = if self.looks_through_proc() {
            times.saturating_sub(3).max(1)
        } else {
            1
        };
        first..=times
    }

    fn looks_through_proc(&self) -> bool {
        self.base.starts_with("fcntl(F_SETLEASE)")
    }

    fn total_bytes(&self) -> usize {
        self.blocks * BLOCK_BYTES
    }

    fn shape(&self) -> String {
        format!("{} {BLOCK_BYTES}", self.blocks)
    }

    /// Does it call that as often the next time? Other processes come and go.
    pub fn calls_as_often_again(&self, times: usize) -> bool {
        !self.looks_through_proc() || times < 12
    }
}

const fn opens(name: &'static str, before: Before, base: &'static str) -> Role {
    Role {
        name,
        before,
        operation: Operation::Open,
        blocks: 9,
        options: "",
        base,
        only: &[],
        has_huge_mount: false,
    }
}

const fn closes(name: &'static str, before: Before) -> Role {
    Role {
        operation: Operation::Close,
        ..opens(name, before, "-")
    }
}

/// 3 MiB and a bit: a huge page and a tail.
const fn opens_huge(name: &'static str, base: &'static str, only: &'static [&'static str]) -> Role {
    Role {
        blocks: 439,
        options: "threads=1",
        only,
        ..opens(name, Before::Nothing, base)
    }
}

pub const ROLES: &[Role] = &[
    opens("create", Before::Nothing, "-"),
    opens(
        "create_where_unnamed_files_are_refused",
        Before::Nothing,
        "openat(O_TMPFILE)/1/for_ever/95", // EOPNOTSUPP
    ),
    opens("create_where_links_are_refused", Before::Nothing, "linkat/1/for_ever/1"), // EPERM
    // A small region is backed by faults alone.
    Role {
        options: "threads=1 huge=off",
        ..opens_huge(
            "create_where_fallocate_is_unknown",
            "fallocate/1/for_ever/95",
            &[
                "posix_fallocate",
                "madvise(MADV_POPULATE_WRITE)",
                "mmap",
                "munmap",
                "fstat",
            ],
        )
    },
    opens(
        "create_where_populate_is_unknown",
        Before::Nothing,
        "madvise(MADV_POPULATE_WRITE)/1/for_ever/22", // EINVAL
    ),
    opens_huge(
        "create_with_huge_pages",
        "-",
        &[
            "fallocate",
            "fstat",
            "ioctl(PAGEMAP_SCAN)",
            "madvise(MADV_COLLAPSE)",
            "madvise(MADV_POPULATE_WRITE)",
            "mmap",
            "mremap",
            "munmap",
            "open(mountinfo)",
            "open(pagemap)",
        ],
    ),
    opens_huge(
        "create_with_huge_pages_where_they_cannot_be_counted",
        "ioctl(PAGEMAP_SCAN)/1/for_ever/25", // ENOTTY
        &["open(smaps)"],
    ),
    Role {
        has_huge_mount: true,
        ..opens_huge(
            "create_where_the_mount_has_huge_pages",
            "-",
            &[
                "fallocate",
                "madvise(MADV_HUGEPAGE)",
                "madvise(MADV_NOHUGEPAGE)",
                "madvise(MADV_POPULATE_WRITE)",
                "open(mountinfo)",
            ],
        )
    },
    Role {
        options: "threads=3 huge=off",
        ..opens_huge("create_in_threads", "-", &["pthread_create"])
    },
    Role {
        options: "numa=interleave",
        only: &["mbind", "get_mempolicy"],
        ..opens("create_on_all_nodes", Before::Nothing, "-")
    },
    opens("reclaim", Before::Dead, "-"),
    opens(
        "reclaim_where_leases_are_refused",
        Before::Dead,
        "fcntl(F_SETLEASE)/1/for_ever/22",
    ),
    opens("sweep", Before::DeadOthers, "-"),
    opens("join", Before::Creator, "-"),
    opens("join_an_original", Before::Original, "-"),
    Role {
        operation: Operation::GetReady,
        ..opens("take_over", Before::AbandoningCreator, "-")
    },
    closes("close_as_creator", Before::Nothing),
    closes("close_as_joiner", Before::Creator),
    closes("close_as_last_one_out", Before::LeavingOriginal),
];

/// Sends a command that must succeed.
fn must(process: &mut Process, command: &str, patience: Duration) -> Result<String, String> {
    process.tell(command);
    match process.event(patience) {
        Event::Answer(answer) if answer.starts_with("ok") => Ok(answer),
        other => Err(format!("`{command}`: {other:?}")),
    }
}

fn require(is_true: bool, what: impl FnOnce() -> String) -> Result<(), String> {
    if is_true { Ok(()) } else { Err(what()) }
}

pub struct Stage<'r> {
    role: &'r Role,
    shim: PathBuf,
    shm: Shm,
    neighbour: Process,
    neighbour_inode: Option<u64>,
    holder: Option<Process>,
    victim: Process,
    next: Process,
}

impl<'r> Stage<'r> {
    pub fn new(role: &'r Role, shim: &Path) -> Self {
        let shm = Shm::new();
        let mut neighbour = Process::start(shm.path(), []);
        neighbour.must(&format!("open {NEIGHBOUR} 3 7168 create create 1000 0"));
        neighbour.must(&format!("fill {KEPT}"));
        Self {
            role,
            shim: shim.to_owned(),
            neighbour,
            neighbour_inode: shm.inode(NEIGHBOUR),
            holder: None,
            victim: Self::preloaded(role, &shm, shim),
            next: Process::start(shm.path(), []),
            shm,
        }
    }

    fn preloaded(role: &Role, shm: &Shm, shim: &Path) -> Process {
        let mut variables = vec![("LD_PRELOAD", shim.display().to_string())];
        if role.has_huge_mount {
            let mounts = shm.path().join("mountinfo");
            let device = shm.path().metadata().unwrap().dev();
            let number = format!("{}:{}", libc::major(device), libc::minor(device));
            fs::write(&mounts, format!("1 1 {number} / / rw - tmpfs tmpfs rw,huge=advise\n")).unwrap();
            variables.push(("FAULTS_MOUNTINFO", mounts.display().to_string()));
        }
        Process::start(shm.path(), variables)
    }

    fn restart_victim(&mut self) {
        self.victim = Self::preloaded(self.role, &self.shm, &self.shim);
    }

    /// Every name of the directory but the victim's own mounts.
    fn names(&self) -> Vec<String> {
        let mut names = self.shm.names();
        names.retain(|name| name != "mountinfo");
        names
    }

    /// What a healthy operation calls, and how often.
    pub fn calls(&mut self) -> BTreeMap<String, usize> {
        self.prepare().unwrap();
        match self.operate("-", PATIENCE).unwrap() {
            Event::Answer(answer) if answer.starts_with("ok") => {}
            other => panic!("a healthy operation: {other:?}"),
        }
        let words = self.victim.must("calls");
        self.heals(None).unwrap();
        words
            .split(' ')
            .filter_map(|word| word.rsplit_once(':'))
            .map(|(call, times)| (call.to_owned(), times.parse().unwrap()))
            .collect()
    }

    /// What is there before the victim comes.
    fn prepare(&mut self) -> Result<(), String> {
        match self.role.before {
            Before::Nothing => {}
            Before::Dead => self.shm.leave_dead(ID, 100),
            Before::DeadOthers => {
                self.shm.leave_dead("dead1", 5000);
                self.shm.leave_dead("dead2", 50_000);
            }
            Before::Creator if self.holder.is_some() => {} // the same through all cases
            Before::Creator => {
                let holder = self.holder.insert(Process::start(self.shm.path(), []));
                must(
                    holder,
                    &format!("open {ID} {} create create 1000 0", self.role.shape()),
                    PATIENCE,
                )?;
                must(holder, &format!("fill {KEPT}"), PATIENCE)?;
            }
            Before::Original | Before::LeavingOriginal => {
                let start = || Process::start(self.shm.path(), []);
                let holder = self.holder.get_or_insert_with(start);
                must(holder, &format!("original {ID}"), PATIENCE)?;
                must(holder, &format!("size {}", self.role.total_bytes()), PATIENCE)?;
            }
            Before::AbandoningCreator => {
                let start = || Process::start(self.shm.path(), []);
                let holder = self.holder.get_or_insert_with(start);
                // At its fourth checkpoint it has published; the others are those of two looks and a sweep.
                let shape = self.role.shape();
                holder.tell(&format!("open {ID} {shape} create_or_join create 5000 4 pause"));
                let event = holder.event(PATIENCE);
                require(event == Event::Stopped && self.shm.inode(ID).is_some(), || {
                    format!("the creator: {event:?}")
                })?;
            }
        }
        must(&mut self.victim, "mark", PATIENCE).map(drop)
    }

    /// The operation of the role, while calls fail.
    fn operate(&mut self, rules: &str, deadline: Duration) -> Result<Event, String> {
        // The first rule that fits counts.
        let rules = format!("{rules},{}", self.role.base);
        let (shape, options) = (self.role.shape(), self.role.options);
        // Who maps ahead does not come in early.
        let populate = if self.role.operation == Operation::GetReady {
            "create"
        } else {
            "join"
        };
        let open = |timeout: u32| format!("open {ID} {shape} create_or_join {populate} {timeout} 0 {options}");
        if self.role.operation != Operation::Open {
            must(&mut self.victim, &open(1000), PATIENCE)?;
        }
        match (self.role.before, &mut self.holder) {
            (Before::LeavingOriginal, Some(holder)) => {
                must(holder, "leave", PATIENCE)?;
            }
            (Before::AbandoningCreator, Some(holder)) => {
                holder.go_on();
                let answer = holder.answer();
                require(answer.starts_with("err Interrupted"), || answer)?;
            }
            _ => {}
        }
        let operation = match self.role.operation {
            Operation::Open => open(TIMEOUT),
            Operation::GetReady => "ready".into(),
            Operation::Close => "close".into(),
        };
        self.victim.tell(&format!("faulty {rules} {operation}"));
        Ok(self.victim.event(deadline))
    }

    fn inherited(&self) -> u8 {
        if self.role.before == Before::Creator { KEPT } else { 0 }
    }

    /// After the operation: the victim closes what it has got and holds nothing more, the next constructor gets
    /// its region at once, nobody was robbed, and when all have closed nothing is left.
    fn heals(&mut self, failed: Option<&str>) -> Result<(), String> {
        let byte = self.inherited();
        must(&mut self.victim, "close", PATIENCE)?;
        // A mapping that the kernel would not take back is the one thing that must be left.
        if failed == Some("munmap") {
            self.restart_victim();
        } else {
            must(&mut self.victim, "leaks", PATIENCE)?;
        }
        self.next_is_well(byte)
    }

    fn next_is_well(&mut self, byte: u8) -> Result<(), String> {
        let shape = self.role.shape();
        must(
            &mut self.next,
            &format!("use {ID} {shape} create_or_join join 5000 0"),
            SOON,
        )?;
        must(&mut self.next, &format!("check {byte}"), PATIENCE)?;
        must(&mut self.next, "close", SOON)?;
        let mut left = vec![format!("vllm_ec_{NEIGHBOUR}.mmap")];
        match (self.role.before, &mut self.holder) {
            (Before::Creator, Some(holder)) => {
                must(holder, &format!("check {KEPT}"), PATIENCE)?;
                left.insert(0, format!("vllm_ec_{ID}.mmap"));
            }
            (_, Some(holder)) => {
                must(holder, "close", PATIENCE)?;
            }
            (_, None) => {}
        }
        let names = self.names();
        require(names == left, || format!("left behind: {names:?}"))?;
        require(self.shm.inode(NEIGHBOUR) == self.neighbour_inode, || {
            "the neighbour was robbed".into()
        })
    }

    /// One failure, and all that must hold after it.
    pub fn fault(&mut self, row: &Row, errno: i32, nth: usize, times: Times) -> Result<(), String> {
        let word = if times == Times::Once { "once" } else { "for_ever" };
        let rule = format!("{}/{nth}/{word}/{errno}", row.call);
        let healthy = self.faulty(row, errno, times, &rule);
        if healthy.is_err() {
            self.start_anew();
        }
        let name = nix::errno::Errno::from_raw(errno);
        healthy.map_err(|why| format!("{} {name:?} {times:?} (call {nth}): {why}", row.call))
    }

    fn faulty(&mut self, row: &Row, errno: i32, times: Times, rule: &str) -> Result<(), String> {
        self.prepare()?;
        let answer = match self.operate(rule, DEADLINE)? {
            Event::Answer(answer) => answer,
            Event::Hangs => return Err(format!("hangs: no answer after {DEADLINE:?}")),
            other => return Err(format!("{other:?}")),
        };
        let outcome = Outcome::of(&answer, errno)?;
        let allowed = row.allowed(times);
        require(allowed.contains(&outcome), || {
            format!("`{answer}` is not one of {allowed:?}")
        })?;
        match outcome {
            Outcome::Works if self.role.operation != Operation::Close => {
                let byte = self.inherited();
                if ["mbind", "get_mempolicy"].contains(&row.call) {
                    let warned = must(&mut self.victim, "warnings", PATIENCE)?;
                    require(warned.contains("Numa"), || format!("no warning: `{warned}`"))?;
                }
                must(&mut self.victim, &format!("check {byte}"), PATIENCE)?;
                if self.role.operation == Operation::Open {
                    let inode = answer.rsplit(' ').next().and_then(|inode| inode.parse().ok());
                    require(self.shm.inode(ID) == inode, || format!("no name: `{answer}`"))?;
                }
                self.can_be_joined(byte, JOIN_PATIENCE_MS)?;
                // Where nothing can be announced, only totals can be compared.
                if errno == EINTR && times == Times::Once && self.role.before == Before::Nothing {
                    self.is_refused_to_another_shape()?;
                }
            }
            Outcome::Works => {}
            _ => self.has_left_nothing(times)?,
        }
        self.heals(Some(row.call))
    }

    /// A region that was handed out is everybody's.
    fn can_be_joined(&mut self, byte: u8, patience: u32) -> Result<(), String> {
        let shape = self.role.shape();
        let joined = must(
            &mut self.next,
            &format!("use {ID} {shape} create_or_join join {patience} 0"),
            SOON,
        )?;
        let expected = self.shm.inode(ID).map(|inode| format!("ok joiner {inode}"));
        require(expected.as_ref() == Some(&joined), || {
            format!("a twin: `{joined}`, not {expected:?}")
        })?;
        must(&mut self.next, &format!("check {byte}"), PATIENCE)?;
        must(&mut self.next, "close", SOON).map(drop)
    }

    /// The same total, and another block size.
    fn is_refused_to_another_shape(&mut self) -> Result<(), String> {
        let blocks = 7 * self.role.blocks;
        let open = format!("open {ID} {blocks} 1024 create_or_join join 900 0");
        let answer = self.next.ask(&open);
        require(answer.starts_with("err GeometryMismatch"), || {
            format!("another shape was let in: `{answer}`")
        })
    }

    /// A constructor that failed has taken back what it published, by itself.
    /// What fails for ever may keep it from that.
    fn has_left_nothing(&self, times: Times) -> Result<(), String> {
        // Where somebody else holds it, the name must stay.
        let is_its_own = matches!(self.role.before, Before::Nothing | Before::Dead | Before::DeadOthers);
        if self.role.operation == Operation::Close || !is_its_own || times == Times::ForEver {
            return Ok(());
        }
        let is_of_the_victim = |name: &String| match self.shm.path().join(name).metadata() {
            // The dead file may be there still.
            Ok(meta) => self.role.before != Before::Dead || meta.len() == self.role.total_bytes() as u64,
            Err(_) => false,
        };
        let mut names = self.names();
        names.retain(|name| !name.contains(NEIGHBOUR) && !name.contains("dead") && is_of_the_victim(name));
        require(names.is_empty(), || format!("its error left {names:?} behind"))
    }

    /// The process dies before that call.
    pub fn kill(&mut self, call: &str, nth: usize) {
        let case = format!("{} killed before {call} ({nth})", self.role.name);
        self.prepare().unwrap();
        let event = self.operate(&format!("{call}/{nth}/once/0"), DEADLINE);
        // A mapping that happens to be aligned at once takes fewer calls.
        let is_done_without = matches!(call, "mmap" | "mremap") && matches!(event, Ok(Event::Answer(_)));
        if is_done_without {
            self.start_anew();
            return;
        }
        assert_eq!(event, Ok(Event::Killed(9)), "{case}");
        self.restart_victim();
        let byte = self.inherited();
        if let Err(why) = self.next_is_well(byte) {
            panic!("{case}: {why}");
        }
    }

    /// After a finding: whatever it left must not spoil the cases after it.
    fn start_anew(&mut self) {
        self.restart_victim();
        self.next = Process::start(self.shm.path(), []);
        self.holder = None;
        for name in self.names() {
            if !name.contains(NEIGHBOUR) {
                let _ = fs::remove_file(self.shm.path().join(name));
            }
        }
    }

    /// The end of a role.
    pub fn is_left_empty(&mut self) {
        if let Some(holder) = &mut self.holder {
            holder.must("close");
        }
        self.neighbour.must(&format!("check {KEPT}"));
        self.neighbour.must("close");
        assert_eq!(self.names(), [""; 0]);
    }
}
