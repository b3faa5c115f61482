//! Calls that a signal interrupted are made again: a bounded number of times, since none of them waits for anybody.

use nix::errno::Errno;

const MOST_INTERRUPTIONS: u32 = 1000;

/// Makes the call again for as long as it answers `EINTR`.
pub(crate) fn uninterrupted<T>(mut call: impl FnMut() -> nix::Result<T>) -> nix::Result<T> {
    for _ in 0..MOST_INTERRUPTIONS {
        match call() {
            Err(Errno::EINTR) => {}
            result => return result,
        }
    }
    Err(Errno::EINTR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupted_call_is_made_again_and_an_endless_one_is_not() {
        let mut left = 3;
        let mut call = || {
            left -= 1;
            if left > 0 { Err(Errno::EINTR) } else { Ok(left) }
        };
        assert_eq!(uninterrupted(&mut call), Ok(0));
        assert_eq!(uninterrupted(|| Err::<(), _>(Errno::EINTR)), Err(Errno::EINTR));
        assert_eq!(uninterrupted(|| Err::<(), _>(Errno::EIO)), Err(Errno::EIO));
    }
}
