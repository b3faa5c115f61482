//! What the bench is made of.

// A bench that cannot do its work should stop there, loudly: there is no caller to tell.
#![allow(clippy::expect_used)]

pub mod case;
pub mod place;
pub mod stock;
