//! Signals are the business of the threads that the program knows of.

use nix::sys::signal::{SigSet, SigmaskHow};

/// A thread that is started in here gets no signal: the program's own threads expect them.
pub(crate) fn without_signals<T>(start: impl FnOnce() -> T) -> T {
    let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK);
    let started = start();
    if let Ok(before) = before {
        let _ = before.thread_set_mask();
    }
    started
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_taken_back_where_they_were() {
        let before = SigSet::thread_get_mask().unwrap();
        let inside = without_signals(|| SigSet::thread_get_mask().unwrap());
        assert!(inside.contains(nix::sys::signal::Signal::SIGINT));
        assert_eq!(SigSet::thread_get_mask().unwrap(), before);
    }
}
