//! One role at a time: a worker to which things happen, and what must hold after each.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::libc::EINTR;

use crate::common::Shm;
use crate::common::process::{Event, PATIENCE, Process};
use crate::table::{Outcome, Row, Times};

const ID: &str = "a";
const NEIGHBOUR: &str = "neighbour";
/// Nine blocks that end within a page.
const SHAPE: &str = "9 7168";
const TOTAL_BYTES: usize = 9 * 7168;
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
}

#[derive(Debug)]
pub struct Role {
    pub name: &'static str,
    pub before: Before,
    pub is_closing: bool,
    /// What fails in any case: `call/nth/for_ever/errno`.
    pub base: &'static str,
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

    /// Does it call that as often the next time? Other processes come and go.
    pub fn calls_as_often_again(&self, times: usize) -> bool {
        !self.looks_through_proc() || times < 12
    }
}

const fn opens(name: &'static str, before: Before, base: &'static str) -> Role {
    Role {
        name,
        before,
        is_closing: false,
        base,
    }
}

const fn closes(name: &'static str, before: Before) -> Role {
    Role {
        name,
        before,
        is_closing: true,
        base: "-",
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
    opens(
        "create_where_fallocate_is_unknown",
        Before::Nothing,
        "fallocate/1/for_ever/95",
    ),
    opens(
        "create_where_populate_is_unknown",
        Before::Nothing,
        "madvise/1/for_ever/22",
    ), // EINVAL
    opens("reclaim", Before::Dead, "-"),
    opens(
        "reclaim_where_leases_are_refused",
        Before::Dead,
        "fcntl(F_SETLEASE)/1/for_ever/22",
    ),
    opens("sweep", Before::DeadOthers, "-"),
    opens("join", Before::Creator, "-"),
    opens("join_an_original", Before::Original, "-"),
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
            victim: Self::preloaded(&shm, shim),
            next: Process::start(shm.path(), []),
            shm,
        }
    }

    fn preloaded(shm: &Shm, shim: &Path) -> Process {
        Process::start(shm.path(), [("LD_PRELOAD", shim.display().to_string())])
    }

    fn restart_victim(&mut self) {
        self.victim = Self::preloaded(&self.shm, &self.shim);
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
                must(holder, &format!("open {ID} {SHAPE} create create 1000 0"), PATIENCE)?;
                must(holder, &format!("fill {KEPT}"), PATIENCE)?;
            }
            Before::Original | Before::LeavingOriginal => {
                let start = || Process::start(self.shm.path(), []);
                let holder = self.holder.get_or_insert_with(start);
                must(holder, &format!("original {ID}"), PATIENCE)?;
                must(holder, &format!("size {TOTAL_BYTES}"), PATIENCE)?;
            }
        }
        must(&mut self.victim, "mark", PATIENCE).map(drop)
    }

    /// The operation of the role, while calls fail.
    fn operate(&mut self, rules: &str, deadline: Duration) -> Result<Event, String> {
        // The first rule that fits counts.
        let rules = format!("{rules},{}", self.role.base);
        let open = format!("open {ID} {SHAPE} create_or_join join");
        if !self.role.is_closing {
            self.victim.tell(&format!("faulty {rules} {open} {TIMEOUT} 0"));
            return Ok(self.victim.event(deadline));
        }
        must(&mut self.victim, &format!("{open} 1000 0"), PATIENCE)?;
        if let (Before::LeavingOriginal, Some(holder)) = (self.role.before, &mut self.holder) {
            must(holder, "leave", PATIENCE)?;
        }
        self.victim.tell(&format!("faulty {rules} close"));
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
        must(
            &mut self.next,
            &format!("open {ID} {SHAPE} create_or_join join 5000 0"),
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
        let names = self.shm.names();
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
            Outcome::Works if !self.role.is_closing => {
                let byte = self.inherited();
                must(&mut self.victim, &format!("check {byte}"), PATIENCE)?;
                self.can_be_joined(&answer, byte, JOIN_PATIENCE_MS)?;
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
    fn can_be_joined(&mut self, answer: &str, byte: u8, patience: u32) -> Result<(), String> {
        let joined = must(
            &mut self.next,
            &format!("open {ID} {SHAPE} create_or_join join {patience} 0"),
            SOON,
        )?;
        let inode = |answer: &str| answer.rsplit(' ').next().map(str::to_owned);
        require(
            joined.starts_with("ok joiner") && inode(&joined) == inode(answer),
            || format!("a twin: `{answer}` and `{joined}`"),
        )?;
        must(&mut self.next, &format!("check {byte}"), PATIENCE)?;
        must(&mut self.next, "close", SOON).map(drop)
    }

    /// The same total, and another block size.
    fn is_refused_to_another_shape(&mut self) -> Result<(), String> {
        let answer = self.next.ask(&format!("open {ID} 63 1024 create_or_join join 900 0"));
        require(answer.starts_with("err GeometryMismatch"), || {
            format!("another shape was let in: `{answer}`")
        })
    }

    /// A constructor that failed has taken back what it published, by itself.
    /// What fails for ever may keep it from that.
    fn has_left_nothing(&self, times: Times) -> Result<(), String> {
        // Where somebody else holds it, the name must stay.
        let is_its_own = matches!(self.role.before, Before::Nothing | Before::Dead | Before::DeadOthers);
        if self.role.is_closing || !is_its_own || times == Times::ForEver {
            return Ok(());
        }
        let is_of_the_victim = |name: &String| match self.shm.path().join(name).metadata() {
            // The dead file may be there still.
            Ok(meta) => self.role.before != Before::Dead || meta.len() == TOTAL_BYTES as u64,
            Err(_) => false,
        };
        let mut names = self.shm.names();
        names.retain(|name| !name.contains(NEIGHBOUR) && !name.contains("dead") && is_of_the_victim(name));
        require(names.is_empty(), || format!("its error left {names:?} behind"))
    }

    /// The process dies before that call.
    pub fn kill(&mut self, call: &str, nth: usize) {
        let case = format!("{} killed before {call} ({nth})", self.role.name);
        self.prepare().unwrap();
        let event = self.operate(&format!("{call}/{nth}/once/0"), DEADLINE);
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
        for name in self.shm.names() {
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
        assert_eq!(self.shm.names(), [""; 0]);
    }
}
