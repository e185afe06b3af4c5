//! Events at the last node of a cluster during a round, observed by clients of the first node.

use std::{
    collections::BTreeMap,
    io,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use envd::HttpAnswer;
use model::{Timeline, chain};
use serde_json::Value;
use testbed::{
    api::Api,
    cluster::{Cluster, Node},
};

use super::super::{
    e2b::{E2b, Remote},
    exec_and_compare, exec_checked,
};
use crate::{
    clock,
    event::{Failure, FailureCause, Happened},
    plan::Round,
    scenario::{EventCount, EventKind, EventSpec, EventTime, ExecSpec},
};

/// Maximum duration of each part of an event.
const LIMIT: Duration = Duration::from_secs(120);
/// How long a node stays dead after its loss was reported. No host boots faster.
const DEAD: Duration = Duration::from_secs(5);
/// Polling interval.
const LOOK: Duration = Duration::from_millis(50);
/// Timeout of a poll. A node may forward it to a node that no longer responds.
const LOOK_LIMIT: Duration = Duration::from_millis(250);
/// Interval between two commands of a client.
const PACE: Duration = Duration::from_millis(20);

/// A cluster and its event.
#[derive(Debug)]
pub struct Stage<'a> {
    pub cluster: &'a Cluster,
    pub spec: EventSpec,
    /// Nodes that the scenario cordons, except while the sandboxes of the event are created.
    pub closed: &'a [String],
    /// The first node as a target.
    pub first: E2b,
    /// Command of the clients.
    pub exec: &'a ExecSpec,
    /// Ends all waits early.
    pub interrupted: &'a AtomicBool,
}

/// The sandboxes of the node before the event, each with a checksum of the memory it has written.
#[derive(Debug)]
pub struct Scene {
    running: Vec<(Remote, Vec<u8>)>,
    paused: Vec<(Remote, Vec<u8>)>,
}

impl Stage<'_> {
    /// Creates the sandboxes on the last node, while the other nodes are cordoned.
    ///
    /// # Errors
    /// Returns an error that names the failed step.
    pub fn prepare(&self) -> Result<Scene, Failure> {
        let all = self.cluster.nodes().iter().map(Node::name);
        let others = all.filter(|name| *name != self.victim().name());
        let others: Vec<String> = others.map(str::to_owned).collect();
        self.cluster.close(&others).map_err(|e| faulty(&e))?;
        let make = |count: u32| {
            (0..count)
                .map(|_| self.make())
                .collect::<Result<Vec<_>, _>>()
        };
        let (running, paused) = (make(self.spec.running)?, make(self.spec.paused)?);
        for (sandbox, _) in &paused {
            let path = format!("{}/pause", path_of(sandbox));
            accepted(&self.first.api.send("POST", &path, "{}"))?;
        }
        // Wait until the first node lists them.
        let count = u64::from(self.spec.running);
        let seen = |node: &Value| node["sandboxCount"] == count;
        self.until(|| self.look(self.observer(), seen))
            .ok_or_else(|| failed("the first node does not see the sandboxes of the last one"))?;
        self.restore()?;
        Ok(Scene { running, paused })
    }

    fn make(&self) -> Result<(Remote, Vec<u8>), Failure> {
        let mut sandbox = self.first.start(&mut Timeline::default())?;
        let written = self.spec.written.0;
        let script = format!("head -c {written} /dev/urandom > /dev/shm/written");
        exec_checked(&mut sandbox, &self.shell(&script))?;
        let sum = self.sum(&mut sandbox)?;
        Ok((sandbox, sum))
    }

    fn sum(&self, sandbox: &mut Remote) -> Result<Vec<u8>, Failure> {
        let sum = self.shell("sha256sum /dev/shm/written");
        exec_checked(sandbox, &sum).map(|output| output.stdout)
    }

    fn shell(&self, script: &str) -> ExecSpec {
        ExecSpec {
            argv: ["/bin/sh", "-c", script].map(str::to_owned).into(),
            cell: None,
            ..self.exec.clone()
        }
    }

    /// Triggers the event after `base_ns` plus its delay, and waits until the cluster has recovered.
    pub fn run(&self, scene: Scene, round: &Round, base_ns: u64) -> Happened {
        let at_ns = base_ns + clock::nanoseconds(self.spec.after);
        let mut happened = Happened {
            round: round.index,
            row: round.row,
            at_ns,
            times: BTreeMap::new(),
            counts: BTreeMap::new(),
            failure: None,
        };
        let done = match self.spec.kind {
            EventKind::KillNode => self.kill(&scene, &mut happened),
            EventKind::DrainNode => self.drain(scene, &mut happened),
        };
        if let Err(failure) = done.and_then(|()| self.restore()) {
            happened.failure.get_or_insert(failure.message);
        }
        happened
    }

    /// Uncordons all nodes, except those that the scenario cordons.
    fn restore(&self) -> Result<(), Failure> {
        self.cluster.close(self.closed).map_err(|e| faulty(&e))
    }

    fn kill(&self, scene: &Scene, happened: &mut Happened) -> Result<(), Failure> {
        clock::sleep_until(happened.at_ns);
        let died_ns = clock::monotonic_ns();
        happened.at_ns = died_ns;
        self.victim().die().map_err(|e| faulty(&e))?;
        let unhealthy = |node: &Value| node["status"] == "unhealthy";
        let mut seen = None;
        let mut reported = vec![None; scene.running.len()];
        self.until(|| {
            if seen.is_none() && self.look(self.observer(), unhealthy) {
                seen = Some(clock::monotonic_ns() - died_ns);
            }
            for (at, (sandbox, _)) in reported.iter_mut().zip(&scene.running) {
                if at.is_none() && self.is_reported(sandbox) {
                    *at = Some(clock::monotonic_ns() - died_ns);
                }
            }
            seen.is_some() && reported.iter().all(Option::is_some)
        });
        clock::sleep_until(clock::monotonic_ns() + clock::nanoseconds(DEAD));
        let revived_ns = clock::monotonic_ns();
        let revived = self.victim().revive().map_err(|e| failed(&chain(&e)));
        let ready = |node: &Value| node["status"] == "ready";
        let back = self.until(|| self.look(self.observer(), ready));
        let back = back.map(|at_ns| at_ns - revived_ns);
        for (time, ns) in [
            (EventTime::Unhealthy, vec![seen]),
            (EventTime::ReportedLost, reported),
            (EventTime::ReadyAgain, vec![back]),
        ] {
            if ns.contains(&None) {
                let why = format!("{} did not come within {LIMIT:?}", time.name());
                happened.failure.get_or_insert(why);
            }
            happened.times.insert(time, ns);
        }
        revived
    }

    /// Whether the first node reports the sandbox as lost, with its last known state.
    fn is_reported(&self, sandbox: &Remote) -> bool {
        let answer = brief(&self.first.api).send("GET", &path_of(sandbox), "");
        answer.is_ok_and(|answer| {
            let text = String::from_utf8_lossy(&answer.body);
            answer.status == 502 && text.contains("is unreachable: it was running")
        })
    }

    fn drain(&self, scene: Scene, happened: &mut Happened) -> Result<(), Failure> {
        let Scene {
            mut running,
            mut paused,
        } = scene;
        let moved_before = self.moved_bytes()?;
        let (over, failed_commands) = (&AtomicBool::new(false), &AtomicU64::new(0));
        let (drained, gaps) = thread::scope(|scope| {
            let clients: Vec<_> = running
                .iter_mut()
                .map(|(sandbox, _)| {
                    scope.spawn(move || self.longest_gap(sandbox, over, failed_commands))
                })
                .collect();
            clock::sleep_until(happened.at_ns);
            let asked_ns = clock::monotonic_ns();
            happened.at_ns = asked_ns;
            let drained = self
                .victim()
                .set_status(r#"{"status":"draining","move":true}"#)
                .map_err(|e| faulty(&e))
                .map(|()| {
                    let empty =
                        |node: &Value| node["sandboxCount"] == 0 && node["pausedCount"] == 0;
                    let at_ns = self.until(|| self.look(self.victim(), empty));
                    at_ns.map(|at_ns| at_ns - asked_ns)
                });
            over.store(true, Ordering::Relaxed);
            let gaps = clients.into_iter().map(|client| match client.join() {
                Ok(gap) => gap,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            (drained, gaps.collect::<Vec<_>>())
        });
        let drained = drained?;
        let mut lost = 0;
        for (sandbox, _) in &paused {
            let path = format!("{}/connect", path_of(sandbox));
            // If the resume fails, the check below fails too.
            let _ = self.first.api.send("POST", &path, r#"{"timeout":300}"#);
        }
        for (sandbox, before) in running.iter_mut().chain(&mut paused) {
            let found = self.sum(sandbox);
            if !found.as_ref().is_ok_and(|sum| sum == before) {
                lost += 1;
                let why = found
                    .err()
                    .map_or("another content".to_owned(), |f| f.message);
                let id = &sandbox.created.sandbox_id;
                happened.failure.get_or_insert(format!("lost: {id}: {why}"));
            }
        }
        if drained.is_none() {
            let why = format!("the node is not empty after {LIMIT:?}");
            happened.failure.get_or_insert(why);
        }
        happened.times.insert(EventTime::Empty, vec![drained]);
        happened.times.insert(EventTime::Gap, gaps);
        let moved = self.moved_bytes()?.saturating_sub(moved_before);
        happened.counts.extend([
            (EventCount::Lost, lost),
            (
                EventCount::FailedCommands,
                failed_commands.load(Ordering::Relaxed),
            ),
            (EventCount::MovedBytes, moved),
        ]);
        Ok(())
    }

    /// Repeats the command until `over`, and returns the longest time between two correct responses; `None` if
    /// there was none at the end. Counts the other commands in `failed`.
    fn longest_gap(
        &self,
        sandbox: &mut Remote,
        over: &AtomicBool,
        failed: &AtomicU64,
    ) -> Option<u64> {
        let (mut last_ns, mut longest_ns) = (clock::monotonic_ns(), 0);
        let mut ends: Option<Instant> = None;
        loop {
            let is_right = exec_and_compare(sandbox, self.exec).is_ok();
            if is_right {
                let now_ns = clock::monotonic_ns();
                longest_ns = longest_ns.max(now_ns - last_ns);
                last_ns = now_ns;
            } else {
                failed.fetch_add(1, Ordering::Relaxed);
            }
            if over.load(Ordering::Relaxed) {
                let end = ends.get_or_insert_with(|| Instant::now() + LIMIT);
                if is_right {
                    return Some(longest_ns);
                }
                if Instant::now() > *end || self.interrupted.load(Ordering::Relaxed) {
                    return None;
                }
            }
            thread::sleep(PACE);
        }
    }

    fn observer(&self) -> &Node {
        &self.cluster.nodes()[0]
    }

    fn victim(&self) -> &Node {
        &self.cluster.nodes()[self.cluster.nodes().len() - 1]
    }

    /// Whether the last node, as seen by `by`, is as wanted. A timeout counts as no.
    fn look(&self, by: &Node, is_wanted: impl Fn(&Value) -> bool) -> bool {
        let path = format!("/nodes/{}", self.victim().name());
        let answer = brief(by.api()).send("GET", &path, "");
        let node = answer.ok().filter(|answer| answer.status == 200);
        let node = node.and_then(|answer| serde_json::from_slice(&answer.body).ok());
        node.is_some_and(|node| is_wanted(&node))
    }

    /// Waits for a condition and returns the time at which it was observed; `None` after [`LIMIT`] or if the run is
    /// interrupted.
    fn until(&self, mut is_done: impl FnMut() -> bool) -> Option<u64> {
        let end = Instant::now() + LIMIT;
        while Instant::now() < end && !self.interrupted.load(Ordering::Relaxed) {
            if is_done() {
                return Some(clock::monotonic_ns());
            }
            thread::sleep(LOOK);
        }
        None
    }

    /// Bytes that all nodes have received through moves so far.
    fn moved_bytes(&self) -> Result<u64, Failure> {
        let mut sum = 0;
        for node in self.cluster.nodes() {
            let answer = accepted(&node.api().send("GET", "/metrics", ""))?;
            let mut lines = answer.lines();
            let bytes = lines.find_map(|line| line.strip_prefix("cube_cluster_moved_bytes_total "));
            sum += bytes
                .and_then(|bytes| bytes.trim().parse::<u64>().ok())
                .unwrap_or(0);
        }
        Ok(sum)
    }
}

/// The same API with the timeout of a poll.
fn brief(api: &Api) -> Api {
    Api {
        timeout: LOOK_LIMIT,
        ..api.clone()
    }
}

fn path_of(sandbox: &Remote) -> String {
    format!("/sandboxes/{}", sandbox.created.sandbox_id)
}

/// The body of a successful response.
fn accepted(answer: &io::Result<HttpAnswer>) -> Result<String, Failure> {
    match answer {
        Err(error) => Err(faulty(error)),
        Ok(answer) if answer.status < 300 => Ok(String::from_utf8_lossy(&answer.body).into_owned()),
        Ok(answer) => Err(failed(&format!(
            "status {}: {}",
            answer.status,
            String::from_utf8_lossy(&answer.body)
        ))),
    }
}

fn faulty(error: &io::Error) -> Failure {
    failed(&error.to_string())
}

fn failed(why: &str) -> Failure {
    Failure {
        cause: FailureCause::Create,
        message: format!("event: {why}"),
    }
}
