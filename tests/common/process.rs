//! The test's side of a worker: commands go to its standard input, answers come from its standard output.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use nix::libc;
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;

use super::worker::{ANSWER, DIRECTORY};

/// Ends a hung test with a message of its own; no test relies on how long anything really takes.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// What a worker came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    Answer(String),
    /// By SIGSTOP.
    Stopped,
    Killed(i32),
    Exited(i32),
    /// None of these in time.
    Hangs,
}

pub struct Process {
    child: Child,
    commands: Option<ChildStdin>,
    answers: Receiver<String>,
}

impl Process {
    /// A worker in `directory`, with these variables.
    pub fn start<'v>(directory: &Path, variables: impl IntoIterator<Item = (&'v str, String)>) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "worker", "--nocapture", "--test-threads=1", "-q"])
            .env(DIRECTORY, directory)
            .envs(variables)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let commands = child.stdin.take();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                // The test harness in the worker prints lines of its own.
                let Some((_, answer)) = line.split_once(ANSWER) else {
                    continue;
                };
                if sender.send(answer.to_owned()).is_err() {
                    break;
                }
            }
        });
        Self {
            child,
            commands,
            answers,
        }
    }

    /// Sends a command; a worker that is dead by now shows in the next event.
    pub fn tell(&mut self, command: &str) {
        if let Some(commands) = &mut self.commands {
            let _ = writeln!(commands, "{command}");
        }
    }

    /// The next thing that happens to the worker.
    pub fn event(&mut self, patience: Duration) -> Event {
        let began = Instant::now();
        loop {
            // An answer that was given before it died or stopped counts first.
            let is_closed = match self.answers.recv_timeout(Duration::from_micros(300)) {
                Ok(answer) => return Event::Answer(answer),
                Err(end) => end == RecvTimeoutError::Disconnected,
            };
            match self.state() {
                WaitStatus::Stopped(..) => return Event::Stopped,
                WaitStatus::Signaled(_, signal, _) if is_closed => return Event::Killed(signal as i32),
                WaitStatus::Exited(_, code) if is_closed => return Event::Exited(code),
                _ => {}
            }
            if began.elapsed() > patience {
                return Event::Hangs;
            }
            if is_closed {
                std::thread::sleep(Duration::from_micros(300));
            }
        }
    }

    /// Asks the kernel and leaves the answer there, so that `std` can reap the child later.
    fn state(&self) -> WaitStatus {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WSTOPPED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        waitid(Id::Pid(self.pid()), flags).unwrap()
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.child.id()).unwrap())
    }

    /// The answer to the command that was told.
    #[track_caller]
    pub fn answer(&mut self) -> String {
        self.answer_within(PATIENCE)
    }

    #[track_caller]
    pub fn answer_within(&mut self, patience: Duration) -> String {
        match self.event(patience) {
            Event::Answer(answer) => answer,
            other => panic!("no answer within {patience:?}: {other:?}"),
        }
    }

    #[track_caller]
    pub fn ask(&mut self, command: &str) -> String {
        self.tell(command);
        self.answer()
    }

    /// [`Process::ask`] for a command that must succeed: the words behind `ok`.
    #[track_caller]
    pub fn must(&mut self, command: &str) -> String {
        let answer = self.ask(command);
        let Some(rest) = answer.strip_prefix("ok") else {
            panic!("`{command}`: {answer}");
        };
        rest.trim().to_owned()
    }

    fn signal(&self, number: i32) {
        #[allow(unsafe_code)] // nix has `kill` only with a feature that a build without kill points lacks
        // SAFETY: kill takes integers; the child is not reaped before `self` is dropped.
        unsafe {
            libc::kill(self.pid().as_raw(), number);
        }
    }

    pub fn go_on(&self) {
        self.signal(libc::SIGCONT);
        let began = Instant::now();
        // Until then the kernel goes on reporting the stop.
        while matches!(self.state(), WaitStatus::Stopped(..)) && began.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// SIGKILL; returns when the kernel has taken everything down.
    pub fn kill(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}
