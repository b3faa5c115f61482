//! Deadlines, pauses and the caller's wish to stop. The pause is pure; only [`Waiter`] sleeps.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use crate::error::{Error, Result, Warning};
use crate::fork::Process;

/// Whom the core works for. A closure that answers the first question is one.
pub trait Host {
    /// Asked between the steps of everything that can take long; `Break` means stop and undo.
    /// The Python binding looks for signals here.
    fn checkpoint(&mut self) -> ControlFlow<()>;

    /// Told between the pieces of a long preparation: bytes done so far, and in all.
    fn progress(&mut self, _done_bytes: usize, _total_bytes: usize) {}

    /// Told at once, since what it warns of may end the process.
    fn warn(&mut self, _warning: &Warning) {}
}

impl<F: FnMut() -> ControlFlow<()>> Host for F {
    fn checkpoint(&mut self) -> ControlFlow<()> {
        self()
    }
}

/// The host of one call.
pub type Checkpoint<'a> = dyn Host + 'a;

const SHORTEST_PAUSE: Duration = Duration::from_micros(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(10);

/// How long to sleep after having waited for `elapsed`: a sixteenth of it, within limits. A short
/// wait is noticed within microseconds, a long one costs a hundred looks a second.
#[must_use]
pub fn pause_after(elapsed: Duration) -> Duration {
    (elapsed / 16).clamp(SHORTEST_PAUSE, LONGEST_PAUSE)
}

/// One wait: when it began, when it must end, and whom to ask whether it should go on.
pub struct Waiter<'a, 'c> {
    began: Instant,
    limit: Duration,
    host: &'a mut Checkpoint<'c>,
    process: Process,
}

impl std::fmt::Debug for Waiter<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Waiter")
            .field("began", &self.began)
            .field("limit", &self.limit)
            .finish_non_exhaustive()
    }
}

impl<'a, 'c> Waiter<'a, 'c> {
    pub fn new(limit: Duration, host: &'a mut Checkpoint<'c>) -> Self {
        Self {
            began: Instant::now(),
            limit,
            host,
            process: Process::current(),
        }
    }

    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    #[must_use]
    pub fn is_over(&self) -> bool {
        self.elapsed() >= self.limit
    }

    /// # Errors
    /// [`Error::Interrupted`] if the caller wants to stop, [`Error::Forked`].
    pub fn checkpoint(&mut self) -> Result<()> {
        let answer = self.host.checkpoint();
        self.must_be_the_same_process()?;
        match answer {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(Error::Interrupted),
        }
    }

    /// Whatever the host runs may have forked, and this be the child: what is under construction is the parent's.
    fn must_be_the_same_process(&self) -> Result<()> {
        if self.process.is_current() {
            Ok(())
        } else {
            Err(Error::Forked)
        }
    }

    /// # Errors
    /// [`Error::Forked`].
    pub fn warn(&mut self, warning: &Warning) -> Result<()> {
        self.host.warn(warning);
        self.must_be_the_same_process()
    }

    /// # Errors
    /// [`Error::Forked`].
    pub fn progress(&mut self, done_bytes: usize, total_bytes: usize) -> Result<()> {
        self.host.progress(done_bytes, total_bytes);
        self.must_be_the_same_process()
    }

    /// Sleeps for a pause that fits a wait that began at `since`, never past the end of the whole.
    ///
    /// # Errors
    /// [`Error::Interrupted`] if the caller wants to stop.
    pub fn pause(&mut self, since: Instant) -> Result<()> {
        self.checkpoint()?;
        let left = self.limit.saturating_sub(self.elapsed());
        std::thread::sleep(pause_after(since.elapsed()).min(left));
        Ok(())
    }
}

/// A checkpoint that never stops.
pub fn never_stop() -> impl FnMut() -> ControlFlow<()> {
    || ControlFlow::Continue(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_with_the_wait_and_stay_within_limits() {
        assert_eq!(pause_after(Duration::ZERO), SHORTEST_PAUSE);
        assert_eq!(pause_after(Duration::from_millis(32)), Duration::from_millis(2));
        assert_eq!(pause_after(Duration::from_secs(3600)), LONGEST_PAUSE);
    }

    #[test]
    fn a_break_ends_the_wait() {
        let mut stop = || ControlFlow::Break(());
        let mut waiter = Waiter::new(Duration::from_secs(60), &mut stop);
        assert!(matches!(waiter.pause(Instant::now()), Err(Error::Interrupted)));
    }
}
