//! One flat, pinned region of `/dev/shm`, shared by every process of an inference engine.
//!
//! The path of the data, from top to bottom: [`spec`] says what is wanted, [`directory`], [`mod@file`] and
//! `publish` find or make the file, with [`lock`] and [`holders`] for signs of life and [`wait`] for time, [`mapping`] maps it,
//! [`reserve`], [`numa`], [`huge`] and [`prefault`] put pages behind it, [`pin`] registers it with a device ([`cuda`] is the only file that
//! names cudarc), and [`region`] is the state machine over all of them. [`copy`] plans a copy of many blocks,
//! which `transfer` carries out with the loops of `kernel`. [`reap`] removes what the dead
//! left. For whoever operates it: [`mod@list`] says what is there, [`preflight`] what would fit, [`counters`] what was
//! done. The `python` module is the only one that names pyo3.

pub mod cgroup;
pub mod check;
pub mod copy;
pub mod counters;
pub mod directory;
pub mod error;
pub mod file;
pub mod fork;
#[cfg(feature = "python")]
mod gate;
mod held;
pub mod holders;
pub mod huge;
mod kernel;
pub mod list;
#[cfg(feature = "cuda")]
pub mod locate;
pub mod lock;
pub mod mapping;
pub mod numa;
mod opening;
pub mod pin;
pub mod prefault;
pub mod preflight;
mod publish;
pub mod reap;
pub mod region;
pub mod reserve;
mod retry;
mod signals;
mod slots;
pub mod spec;
pub mod step;
mod sync;
mod text;
mod transfer;
#[cfg(feature = "python")]
mod turn;
pub mod wait;

#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "python")]
mod python;

pub use copy::Ids;
pub use error::{Error, Result};
pub use region::{DEV_SHM, OpenReport, Region, Role};
pub use spec::{EngineId, Geometry, HugePages, Mode, Numa, Populate, Spec};
