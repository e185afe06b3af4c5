//! The null target, whose starts return at once. Its times are the overhead of the harness itself: waking a worker,
//! taking stamps, comparing the output and recording the attempt.
//!
//! Every other target adds its own work to this overhead. A latency close to that of the null target therefore
//! reveals nothing about the measured system.

use model::{StartPhase, Timeline};

use super::{CloneId, Output, PageCache, Sandbox, Target};
use crate::{
    clock,
    event::{Failure, FailureCause},
    scenario::ExecSpec,
};

/// The target of null rounds.
#[derive(Clone, Copy, Debug)]
pub struct Null;

impl Target for Null {
    fn create(&self, _: CloneId, timeline: &mut Timeline) -> Result<Box<dyn Sandbox>, Failure> {
        timeline.stamp(StartPhase::Replied, clock::monotonic_ns());
        Ok(Box::new(Self))
    }

    fn prepare_cache(&self, _: PageCache) -> std::io::Result<()> {
        Ok(())
    }

    fn cpu_ns(&self) -> Option<u64> {
        None
    }
}

impl Sandbox for Null {
    fn exec(&mut self, command: &ExecSpec) -> Result<Output, Failure> {
        Ok(Output {
            status: Some(0),
            stdout: command.expect_stdout.clone().into_bytes(),
            stderr: Vec::new(),
        })
    }

    fn write_file(&mut self, _: &str, _: &[u8]) -> Result<(), Failure> {
        Err(unsupported("files"))
    }

    fn set_network(&mut self, _: &serde_json::Value) -> Result<(), Failure> {
        Err(unsupported("network policy"))
    }

    fn pid(&self) -> Option<u32> {
        None
    }

    fn kill(self: Box<Self>) -> Result<(), Failure> {
        Ok(())
    }
}

fn unsupported(what: &str) -> Failure {
    Failure {
        cause: FailureCause::Exec,
        message: format!("the null target has no {what}"),
    }
}
