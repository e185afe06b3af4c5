//! Explores each state that a small pool can reach, including crashes of the server.
//!
//! Requests, events, admission and recovery are decided by the code of the pool itself: [`crate::slot`],
//! [`crate::policy`] and [`crate::recover::fate`]. Only the environment is a model ([`world`]): processes, directories
//! and records, the steps of jobs on them, and the responses to callers. A violated property is printed with the
//! shortest path to it.
//!
//! The explorer is not the crate `stateright`, because that brings a web server and a second version of `hashbrown`,
//! which `deny.toml` refuses.

mod search;
mod world;

use search::{Found, explore};
use world::{Bounds, World};

use crate::{
    lifetime::{Lifetime, OnTimeout},
    state::PauseMode,
};

/// Lower bound on the number of states. Fewer would mean that the model does not reach the intended states.
const FEWEST: usize = 2_000;

const ENDS: OnTimeout = OnTimeout::End;
const PAUSES: OnTimeout = OnTimeout::Pause(PauseMode::Memory);

fn check(on_timeout: OnTimeout, bounds: Bounds) {
    let lifetime = Lifetime {
        end_at: 1_000,
        timeout_s: 1,
        on_timeout,
        auto_resume: true,
    };
    match explore(World::new(lifetime, bounds)) {
        Found::Nothing { states } => {
            println!("{states} states");
            assert!(states > FEWEST, "only {states} states were explored");
        }
        Found::Violation { property, way } => {
            panic!("property: {property}\n  {}", way.join("\n  "))
        }
    }
}

/// Two creates compete for a place. Failures occur, and crashes, including crashes of the recovering server.
#[test]
fn every_state_of_one_slot_keeps_the_properties() {
    let bounds = Bounds {
        max: 1,
        warm: 0,
        creates: 2,
        requests: 1,
        failures: 1,
        crashes: 2,
        closes: false,
    };
    check(ENDS, bounds);
    let bounds = Bounds {
        requests: 2,
        crashes: 1,
        ..bounds
    };
    check(PAUSES, bounds);
}

/// A create takes a warm slot, which is refilled. The server stops during this.
#[test]
fn every_state_of_a_stock_keeps_the_properties() {
    let bounds = Bounds {
        max: 2,
        warm: 1,
        creates: 1,
        requests: 1,
        failures: 1,
        crashes: 1,
        closes: true,
    };
    check(ENDS, bounds);
}

/// Two sandboxes are paused and resumed at the same time.
#[test]
fn every_state_of_two_slots_keeps_the_properties() {
    let bounds = Bounds {
        max: 2,
        warm: 0,
        creates: 2,
        requests: 2,
        failures: 0,
        crashes: 0,
        closes: false,
    };
    check(PAUSES, bounds);
}
