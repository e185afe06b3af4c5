use std::sync::{Arc, Condvar, Mutex};

use model::StartPhase;

use super::*;
use crate::{
    plan, scenario,
    target::{Pool, Sandbox},
};

/// A server whose CPU time is its number of kills. A kill waits for the reading at the end of the starts.
#[derive(Default)]
struct Killing {
    /// Readings of the CPU time since the last create, and number of kills.
    counts: Mutex<(u32, u64)>,
    was_read: Condvar,
}

struct Server(Arc<Killing>);

struct Killed(Arc<Killing>);

impl Target for Server {
    fn create(&self, _: CloneId, timeline: &mut Timeline) -> Result<Box<dyn Sandbox>, Failure> {
        timeline.stamp(StartPhase::Replied, clock::monotonic_ns());
        self.0.counts.lock().unwrap().0 = 0;
        Ok(Box::new(Killed(Arc::clone(&self.0))))
    }

    fn prepare_cache(&self, _: PageCache) -> std::io::Result<()> {
        Ok(())
    }

    fn cpu_ns(&self) -> Option<u64> {
        let mut counts = self.0.counts.lock().unwrap();
        counts.0 += 1;
        self.0.was_read.notify_all();
        Some(counts.1)
    }

    fn pool(&self) -> Option<Pool> {
        Some(Pool {
            warm: 4,
            filling: 0,
            memory: None,
        })
    }
}

impl Sandbox for Killed {
    fn exec(&mut self, command: &ExecSpec) -> Result<Output, Failure> {
        Ok(Output {
            status: Some(0),
            stdout: command.expect_stdout.clone().into_bytes(),
            stderr: Vec::new(),
        })
    }

    fn write_file(&mut self, _: &str, _: &[u8]) -> Result<(), Failure> {
        unreachable!("no file is written")
    }

    fn set_network(&mut self, _: &serde_json::Value) -> Result<(), Failure> {
        unreachable!("no network")
    }

    fn pid(&self) -> Option<u32> {
        None
    }

    fn kill(self: Box<Self>) -> Result<(), Failure> {
        let counts = self.0.counts.lock().unwrap();
        // Continue if the reading never comes; the test then fails below.
        let enough = Duration::from_secs(20);
        let waited = (self.0.was_read).wait_timeout_while(counts, enough, |counts| counts.0 == 0);
        waited.unwrap().0.1 += 1;
        Ok(())
    }
}

#[test]
fn the_cost_of_starts_does_not_contain_the_lifetimes_after_them() {
    let text = "rounds = 1\nwarmup_rounds = 0\n[target]\nkind = \"process\"\n[arrival]\nkind = \"burst\"\nstarts = 5\n\
                [baseline]\nkind = \"none\"\n[hold]\nuntil = \"lifetime\"\nlifetime = \"1ms\"\n";
    let scenario = scenario::parse("t", text).unwrap();
    let plan = plan::build(&scenario);
    let server = Server(Arc::default());
    let (events, recorded) = channel();
    let runner = Runner {
        scenario: &scenario,
        plan: &plan,
        target: &server,
        beside: None,
        peers: &[],
        baseline: &Null,
        network: None,
        stage: None,
        group: None,
        guest_memory: None,
        events,
        interrupted: &AtomicBool::new(false),
    };
    assert_eq!(runner.run().unwrap(), EndReason::Complete);
    drop(runner);
    let of_clones: Vec<_> = recorded
        .iter()
        .filter_map(|event| match event {
            RunEvent::Spent(spent) if spent.subject == Subject::Clone => {
                Some((spent.server_cpu_ns, spent.cpu_ns))
            }
            _ => None,
        })
        .collect();
    assert_eq!(
        of_clones,
        [(Some(0), Some(5))],
        "at the last start, and in all"
    );
}
