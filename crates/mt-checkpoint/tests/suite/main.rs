//! Saving, restoring and what happens when either is disturbed.

mod crash;
mod damage;
mod faults;
mod locate;
mod round_trip;
mod support;
