//! The options of a run.

use std::{path::PathBuf, time::Duration};

use crate::setup::Setup;

/// Options of a run.
#[derive(Clone, Debug)]
pub struct RestartSpec {
    pub setup: Setup,
    /// Sandboxes that live for the whole run; at least 1.
    pub sandboxes: usize,
    /// Restarts of each kind. They take place in the order of these fields.
    pub unplanned: u32,
    pub planned: u32,
    pub bare: u32,
    /// Two builds of the server that take turns. `None`: every restart starts the same build.
    pub builds: Option<Builds>,
    /// Seed of all random moments and choices.
    pub seed: u64,
    pub limits: Limits,
    /// Where the log of the server is kept. `None`: it is removed.
    pub log: Option<PathBuf>,
}

/// Paths of two builds of `cube-api`. The run begins with the first.
#[derive(Clone, Debug)]
pub struct Builds(pub [PathBuf; 2]);

/// Limits in addition to what is always promised. `None`: no limit.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// Of the time from the start of the program to its first answer.
    pub answer: Option<Duration>,
    /// Of the time from the start of the program until each sandbox is reached.
    pub reach: Option<Duration>,
    /// Of the longest time without an answer to new connections.
    pub gap: Option<Duration>,
}
