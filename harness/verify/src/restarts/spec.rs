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
    /// Two builds of the server that alternate. `None`: every restart starts the same build.
    pub builds: Option<Builds>,
    /// Seed of all random moments and choices.
    pub seed: u64,
    pub limits: Limits,
    /// File for the server's log. `None`: the log is removed.
    pub log: Option<PathBuf>,
}

/// Paths of two builds of `cube-api`. The run begins with the first.
#[derive(Clone, Debug)]
pub struct Builds(pub [PathBuf; 2]);

/// Limits in addition to the promises. `None`: no limit.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// Maximum time from the start of the program to its first response.
    pub answer: Option<Duration>,
    /// Maximum time from the start of the program until each sandbox is reached.
    pub reach: Option<Duration>,
    /// Maximum time without a response to new connections.
    pub gap: Option<Duration>,
}
