//! The atomics of the protocols between our own threads (`gate`, `slots`, `turn`).
//! `tests/interleavings.rs` builds those files with a module of the same name that holds the atomics of a model checker.

pub use std::sync::atomic::AtomicI32;
#[cfg(feature = "python")]
pub use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
