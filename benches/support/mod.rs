//! What both benches share.

// A bench that cannot do its work should stop there, loudly: there is no caller to tell.
#![allow(clippy::expect_used)]

pub mod case;
pub mod place;
pub mod stock;
