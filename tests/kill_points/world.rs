//! One role at a time: the processes around the victim, and what must hold for them.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use ec_shared_region::step::Step;

use crate::common::Shm;
use crate::common::process::{Event, PATIENCE, Process};
use crate::roles::{Before, Between, Role};

const ID: &str = "a";
const NEIGHBOUR: &str = "neighbour";
/// What those who live have written.
const KEPT: u8 = 0xb5;
/// "At once", and "in under a second".
const SOON: Duration = Duration::from_secs(1);
/// A large region takes its time, where everything is unoptimised and several tests run at once.
const SOON_FOR_LARGE: Duration = Duration::from_secs(5);
/// How long others wait for somebody who is stopped.
const SHORT: Duration = Duration::from_millis(120);

pub struct World<'r> {
    pub role: &'r Role,
    shm: Shm,
    neighbour: RefCell<Process>,
    neighbour_inode: u64,
    /// Constructors that come after the victim: workers that serve all cases of a role.
    next: RefCell<Process>,
    waiter: RefCell<Process>,
}

/// A region that somebody lives in.
#[derive(Debug, Clone, Copy)]
struct Live {
    inode: u64,
    byte: u8,
}

/// The process that dies or stops, and what it does until then: a command, and how its answer begins.
struct Victim {
    process: Process,
    script: Vec<(String, &'static str)>,
    done: usize,
    is_asked: bool,
}

impl Victim {
    /// The next command, if it is not at it already.
    fn ask(&mut self) {
        if !self.is_asked {
            self.process.tell(&self.script[self.done].0);
            self.is_asked = true;
        }
    }

    #[track_caller]
    fn has_answered(&mut self, answer: &str) {
        let (command, expected) = &self.script[self.done];
        assert!(answer.starts_with(expected), "`{command}`: {answer}");
        self.done += 1;
        self.is_asked = false;
    }
}

/// Who holds the region beside the victim.
struct Holder {
    process: Process,
    /// Unknown while it is stopped in its constructor.
    inode: Option<u64>,
}

fn inode_of(opened: &str) -> u64 {
    opened.rsplit(' ').next().unwrap().parse().unwrap()
}

impl<'r> World<'r> {
    pub fn new(role: &'r Role) -> Self {
        let shm = Shm::new();
        let start = || RefCell::new(Process::start(shm.path(), []));
        let (neighbour, next, waiter) = (start(), start(), start());
        let opened = neighbour
            .borrow_mut()
            .must(&format!("open {NEIGHBOUR} 3 7168 create create 1000 0"));
        neighbour.borrow_mut().must(&format!("fill {KEPT}"));
        Self {
            role,
            neighbour_inode: inode_of(&opened),
            neighbour,
            next,
            waiter,
            shm,
        }
    }

    /// A constructor that then waits for its bytes.
    fn use_(&self, blocks: usize, timeout: Duration, populate: &str) -> String {
        let size = self.role.block_size_bytes();
        let millis = timeout.as_millis();
        format!("use {ID} {blocks} {size} create_or_join {populate} {millis} 0")
    }

    fn victim(&self, variable: &'static str, step: Step, nth: usize) -> Victim {
        let role = self.role;
        let (size, blocks, at) = (role.block_size_bytes(), role.blocks, role.interrupted_at);
        let millis = PATIENCE.as_millis();
        let (populate, options) = (role.populate, role.options);
        let open = format!("open {ID} {blocks} {size} create_or_join {populate} {millis} {at} {options}");
        let script = if at > 0 {
            vec![(open, "err Interrupted")]
        } else {
            let mut script = vec![(open, "ok")];
            if role.uses_the_bytes {
                // A large region has other pieces; its pinning is that of the small one.
                let pinned = match role.refused_at {
                    0 if role.is_large() => "",
                    0 => "ok 3",
                    _ => "err Pin",
                };
                let pin = (format!("pin {}", role.refused_at), pinned);
                script.extend([("ready".into(), "ok"), pin.clone()]);
                if role.pins_twice {
                    script.extend([("unpin".into(), "ok"), pin]);
                }
            }
            script.push(("close".into(), "ok"));
            script
        };
        Victim {
            process: Process::start(self.shm.path(), [(variable, format!("{}:{nth}", step.name()))]),
            script,
            done: 0,
            is_asked: false,
        }
    }

    /// What is there before the victim comes.
    fn prepare(&self) -> Option<Holder> {
        let holder = |process, inode| Some(Holder { process, inode });
        match self.role.before {
            Before::Nothing => None,
            Before::Dead(percent) => {
                self.shm.leave_dead(ID, self.role.total_bytes() * percent / 100);
                None
            }
            Before::DeadOthers => {
                self.shm.leave_dead("dead1", 5000);
                self.shm.leave_dead("dead2", 50_000);
                None
            }
            Before::Creator => {
                let mut process = Process::start(self.shm.path(), []);
                let inode = inode_of(&process.must(&self.use_(self.role.blocks, PATIENCE, "create")));
                process.must(&format!("fill {KEPT}"));
                holder(process, Some(inode))
            }
            Before::StoppedCreator(step, nth) => {
                let at = format!("{}:{nth}", step.name());
                let mut process = Process::start(self.shm.path(), [("EC_SHARED_REGION_STOP_AT", at)]);
                process.tell(&self.use_(self.role.blocks, PATIENCE, "create"));
                assert_eq!(process.event(PATIENCE), Event::Stopped);
                holder(process, None)
            }
            Before::Original | Before::UnsizedOriginal => {
                let mut process = Process::start(self.shm.path(), []);
                let inode = inode_of(&process.must(&format!("original {ID}")));
                if self.role.before == Before::Original {
                    process.must(&format!("size {}", self.role.total_bytes()));
                }
                holder(process, Some(inode))
            }
        }
    }

    /// Lets a holder that was waited for, or that waits for the victim, get on with it.
    fn release(&self, holder: &mut Option<Holder>) {
        let Some(holder) = holder else { return };
        match (self.role.before, self.role.between) {
            (Before::StoppedCreator(..), _) => {
                holder.process.go_on();
                let answer = holder.process.answer();
                assert!(answer.starts_with("ok creator"), "{answer}");
                holder.inode = Some(inode_of(&answer));
            }
            (Before::UnsizedOriginal, _) => {
                holder.process.must(&format!("size {}", self.role.total_bytes()));
            }
            (Before::Original, _) => {}
            (_, Between::AnotherComesInEarly) => {
                // It is told at once that its creator is gone, and backs the rest itself.
                holder.process.tell("ready");
                assert_eq!(holder.process.answer_within(SOON), "ok");
                holder.process.must("check 0");
            }
            _ => return,
        }
        holder.process.must(&format!("fill {KEPT}"));
    }

    /// Lets the victim open, pin and close until something else happens than the right answer.
    fn drive(&self, victim: &mut Victim, holder: &mut Option<Holder>) -> Event {
        if self.role.between == Between::AnotherComesInEarly && victim.done == 0 && !victim.is_asked {
            // At its checkpoint, after it has published and before it has reserved a byte.
            victim.ask();
            match victim.process.event(PATIENCE) {
                Event::Stopped if self.shm.inode(ID).is_some() => {}
                event => return event,
            }
            let (size, blocks) = (self.role.block_size_bytes(), self.role.blocks);
            let mut process = Process::start(self.shm.path(), []);
            let millis = PATIENCE.as_millis();
            let opened = process.must(&format!("open {ID} {blocks} {size} create_or_join create {millis} 0"));
            assert!(opened.starts_with("joiner"), "{opened}");
            let inode = Some(inode_of(&opened));
            *holder = Some(Holder { process, inode });
            victim.process.go_on();
        }
        while victim.done < victim.script.len() {
            victim.ask();
            match victim.process.event(PATIENCE) {
                Event::Answer(answer) => victim.has_answered(&answer),
                event => return event,
            }
            if victim.done == 1 {
                self.between(holder);
            }
        }
        Event::Exited(0)
    }

    fn between(&self, holder: &mut Option<Holder>) {
        match self.role.between {
            Between::Nothing | Between::AnotherComesInEarly => {}
            Between::AnotherJoins => {
                let mut process = Process::start(self.shm.path(), []);
                let inode = inode_of(&process.must(&self.use_(self.role.blocks, PATIENCE, "create")));
                process.must(&format!("fill {KEPT}"));
                *holder = Some(Holder {
                    process,
                    inode: Some(inode),
                });
            }
            Between::TheHolderIsKilled => holder.take().unwrap().process.kill(),
        }
    }

    fn keeps_its_bytes(&self, holder: &mut Holder, name_is_gone: bool) {
        if !name_is_gone {
            assert_eq!(self.shm.inode(ID), holder.inode, "a live region was robbed of its name");
        }
        holder.process.must(&format!("check {KEPT}"));
    }

    /// After the victim: the holder and the neighbour have lost nothing, and when all have closed nothing is left.
    fn close_all(&self, mut holder: Option<Holder>, name_is_gone: bool) {
        if let Some(holder) = &mut holder {
            self.keeps_its_bytes(holder, name_is_gone);
            holder.process.must("close");
        }
        self.waiter.borrow_mut().must("close");
        self.next.borrow_mut().must("close");
        assert_eq!(self.shm.inode(NEIGHBOUR), Some(self.neighbour_inode));
        self.neighbour.borrow_mut().must(&format!("check {KEPT}"));
        assert_eq!(self.shm.names(), [format!("vllm_ec_{NEIGHBOUR}.mmap")]);
    }

    pub fn is_left_empty(&self) {
        self.neighbour.borrow_mut().must("close");
        assert_eq!(self.shm.names(), [""; 0]);
    }

    /// What the next constructor must find: the region of the holder, unless its name is gone for good.
    fn live(holder: Option<&Holder>, name_is_gone: bool) -> Option<Live> {
        let inode = holder.filter(|_| !name_is_gone)?.inode?;
        Some(Live { inode, byte: KEPT })
    }

    /// A constructor in `process` is answered soon: with the region of those who live, or else with zeroes.
    #[track_caller]
    fn has_opened(&self, process: &RefCell<Process>, live: Option<Live>) -> Live {
        self.has_opened_or_joined(process, live, None)
    }

    /// The same for a constructor that was there before the victim died: it may have joined the victim's region.
    #[track_caller]
    fn has_opened_or_joined(&self, process: &RefCell<Process>, live: Option<Live>, victims: Option<Live>) -> Live {
        let mut process = process.borrow_mut();
        let answer = process.answer_within(if self.role.is_large() { SOON_FOR_LARGE } else { SOON });
        let opened = answer.strip_prefix("ok ").unwrap_or_else(|| panic!("{answer}"));
        let inode = inode_of(opened);
        let found = match live {
            Some(live) => {
                assert_eq!(inode, live.inode, "a twin of a live region: {opened}");
                assert!(opened.starts_with("joiner"), "{opened}");
                live
            }
            None if opened.starts_with("creator") => Live { inode, byte: 0 },
            None => {
                let victims = victims.unwrap_or_else(|| panic!("joined the dead: {opened}"));
                assert_eq!(inode, victims.inode);
                victims
            }
        };
        process.must(&format!("check {}", found.byte));
        assert_eq!(self.shm.inode(ID), Some(inode));
        found
    }

    /// The victim gets past a step that its role does not reach.
    pub fn runs_unharmed(&self, step: Step, nth: usize) {
        let _case = Case::new("unharmed", self.role, step, nth);
        let mut holder = self.prepare();
        let mut victim = self.victim("EC_SHARED_REGION_KILL_AT", step, nth);
        let end = self.drive(&mut victim, &mut holder);
        assert_eq!(end, Event::Exited(0), "reached a step that is not in its table");
        let name_is_gone = self.role.between == Between::AnotherJoins;
        self.release(&mut holder);
        self.close_all(holder, name_is_gone);
    }

    /// The victim kills itself at the step, and then the next constructor comes.
    pub fn killed_then_next(&self, step: Step, nth: usize, blocks: usize) {
        let _case = Case::new(&format!("killed, then {blocks} blocks"), self.role, step, nth);
        let mut holder = self.prepare();
        let mut victim = self.victim("EC_SHARED_REGION_KILL_AT", step, nth);
        let end = self.drive(&mut victim, &mut holder);
        assert_eq!(end, Event::Killed(9), "never reached the step");
        self.release(&mut holder);
        let name_is_gone = self.role.has_dropped_the_name(step);
        if let Some(holder) = &mut holder {
            self.keeps_its_bytes(holder, name_is_gone);
        }
        self.next.borrow_mut().tell(&self.use_(blocks, PATIENCE, "create"));
        let live = self.has_opened(&self.next, Self::live(holder.as_ref(), name_is_gone));
        self.waiter.borrow_mut().tell(&self.use_(blocks, PATIENCE, "join"));
        self.has_opened(&self.waiter, Some(live));
        self.close_all(holder, name_is_gone);
    }

    /// The victim is stopped at the step, another waits for it, and then it is killed. Who maps ahead waits holding
    /// nothing, who does not comes in and waits there.
    pub fn killed_while_another_waits(&self, step: Step, nth: usize, populate: &str) {
        let what = format!("killed while another (populate={populate}) waits");
        let _case = Case::new(&what, self.role, step, nth);
        let mut holder = self.prepare();
        let mut victim = self.victim("EC_SHARED_REGION_STOP_AT", step, nth);
        let end = self.drive(&mut victim, &mut holder);
        assert_eq!(end, Event::Stopped, "never reached the step");
        // Only a holder has written anything, and where it was killed the victim's region is that of the holder.
        let is_kept = self.role.between == Between::TheHolderIsKilled && self.role.before == Before::Creator;
        let byte = if is_kept { KEPT } else { 0 };
        let victims = self.shm.inode(ID).map(|inode| Live { inode, byte });
        let waiters = self.use_(self.role.blocks, PATIENCE, populate);
        self.waiter.borrow_mut().tell(&waiters);
        std::thread::sleep(Duration::from_millis(10)); // some looks; where it need not wait it is done by now
        victim.process.kill();
        self.release(&mut holder);
        let name_is_gone = self.role.has_dropped_the_name(step);
        let live = Self::live(holder.as_ref(), name_is_gone);
        let live = self.has_opened_or_joined(&self.waiter, live, victims);
        self.next
            .borrow_mut()
            .tell(&self.use_(self.role.blocks, PATIENCE, "create"));
        self.has_opened(&self.next, Some(live));
        self.close_all(holder, name_is_gone);
    }

    /// The victim is stopped at the step: others get their region, or an error by their deadline; then it goes on.
    pub fn stopped_and_continued(&self, step: Step, nth: usize) {
        let _case = Case::new("stopped", self.role, step, nth);
        let mut holder = self.prepare();
        let mut victim = self.victim("EC_SHARED_REGION_STOP_AT", step, nth);
        let end = self.drive(&mut victim, &mut holder);
        assert_eq!(end, Event::Stopped, "never reached the step");

        let began = Instant::now();
        // A joiner's two waits are one after the other: for the file, and in it.
        let waiters = self.use_(self.role.blocks, SHORT, "create");
        self.waiter.borrow_mut().tell(&waiters);
        let answer = self.waiter.borrow_mut().answer();
        assert!(
            began.elapsed() < 2 * SHORT + SOON,
            "past its deadline: {:?}",
            began.elapsed()
        );
        assert!(
            answer.starts_with("ok ") || answer.starts_with("err Timeout"),
            "{answer}"
        );

        if answer.starts_with("ok creator") && self.role.interrupted_at > 0 {
            // It is through before the checkpoint at which it would be interrupted, since it only joins.
            victim.script[0].1 = "";
            victim.script.push(("close".into(), "ok"));
        }
        victim.process.go_on();
        // Who came in early learns of its creator's end, not of its stop.
        let is_released_later = self.role.between == Between::AnotherComesInEarly;
        if !is_released_later {
            self.release(&mut holder);
        }
        let ended = self.drive(&mut victim, &mut holder);
        assert_eq!(ended, Event::Exited(0));
        if is_released_later {
            self.release(&mut holder);
        }
        if answer.starts_with("ok creator") {
            assert_eq!(self.shm.inode(ID), Some(inode_of(&answer)), "the stopped one robbed it");
        }
        self.waiter.borrow_mut().must("close");
        // A joiner whose creator has closed has lost its name for good; else the name is that of who lives.
        let name_is_gone = self.role.between == Between::AnotherJoins;
        self.next
            .borrow_mut()
            .tell(&self.use_(self.role.blocks, PATIENCE, "create"));
        self.has_opened(&self.next, Self::live(holder.as_ref(), name_is_gone));
        self.close_all(holder, name_is_gone);
    }

    /// The victim is stopped at the step, perhaps with the directory's lock, and the holder closes meanwhile.
    pub fn stopped_while_the_holder_closes(&self, step: Step, nth: usize) {
        let _case = Case::new("stopped while the holder closes", self.role, step, nth);
        let mut holder = self.prepare();
        let mut victim = self.victim("EC_SHARED_REGION_STOP_AT", step, nth);
        assert_eq!(
            self.drive(&mut victim, &mut holder),
            Event::Stopped,
            "never reached the step"
        );
        let mut closer = holder.take().unwrap().process;
        closer.tell("close");
        // It waits a second for the lock, and then goes without.
        assert_eq!(closer.answer_within(SOON + SOON), "ok");
        assert_eq!(self.shm.inode(ID), None, "the creator has left its name behind");
        victim.process.go_on();
        // With the old region, whose name is gone, or with a new one.
        assert_eq!(self.drive(&mut victim, &mut holder), Event::Exited(0));
        self.close_all(None, true);
    }

    /// While the victim is stopped, a person removes the name, and a process of the original class, which takes no
    /// lock, gives it to a file of its own. The victim joins that, or ends with what it had, and robs nobody.
    pub fn stopped_while_an_original_takes_the_name(&self, step: Step, nth: usize, then_joins: bool) {
        let _case = Case::new("stopped while an original takes the name", self.role, step, nth);
        let mut holder = self.prepare();
        let mut victim = self.victim("EC_SHARED_REGION_STOP_AT", step, nth);
        assert_eq!(
            self.drive(&mut victim, &mut holder),
            Event::Stopped,
            "never reached the step"
        );
        let _ = std::fs::remove_file(self.shm.file(ID));
        let mut original = Process::start(self.shm.path(), []);
        let inode = inode_of(&original.must(&format!("original {ID}")));
        original.must(&format!("size {}", self.role.total_bytes()));
        original.must(&format!("fill {KEPT}"));
        victim.process.go_on();
        if then_joins {
            let answer = victim.process.answer();
            assert_eq!(answer, format!("ok joiner {inode}"));
            victim.has_answered(&answer);
            victim.process.must("ready");
            victim.process.must(&format!("check {KEPT}"));
        }
        assert_eq!(self.drive(&mut victim, &mut holder), Event::Exited(0));
        if let Some(holder) = &mut holder {
            holder.process.must("close");
        }
        assert_eq!(self.shm.inode(ID), Some(inode), "a live region was robbed of its name");
        original.must(&format!("check {KEPT}"));
        original.must("close");
        self.close_all(None, true);
    }
}

/// Says on which case a test failed.
struct Case(String);

impl Case {
    fn new(what: &str, role: &Role, step: Step, nth: usize) -> Self {
        Self(format!("{}: {what} at {}:{nth}", role.name, step.name()))
    }
}

impl Drop for Case {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed in: {}", self.0);
        }
    }
}
