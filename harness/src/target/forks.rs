//! Forks through E2B's API: each round creates and prepares a parent sandbox, and the clones of the round are forks
//! of it (`POST /sandboxes/{id}/fork`).
//!
//! One request creates a batch of forks. The first worker that needs a fork of a batch sends the request, and the
//! others wait for its response. The wait is part of their latency.

use std::sync::{OnceLock, RwLock};

use envd::HttpAnswer;
use model::{StartPhase, Timeline};
use serde::Deserialize;
use serde_json::json;
use testbed::api::Created;

use super::{
    CloneId, PageCache, Pool, Sandbox, Target,
    e2b::{E2b, LIFETIME_S, Remote},
    exec_and_compare,
};
use crate::{
    clock,
    event::{Failure, FailureCause},
    guest,
    scenario::ParentStep,
};

/// Largest number of forks in one request. Servers limit this number; `cube-api` accepts up to 64.
const BATCH: u32 = 50;

/// Starts the clones of a round as forks of one parent.
#[derive(Debug)]
pub struct Forks {
    e2b: E2b,
    parent: Vec<ParentStep>,
    starts: u32,
    /// Replaced between rounds, read by workers during a round.
    family: RwLock<Option<Family>>,
}

/// The parent of a round and its forks.
#[derive(Debug)]
struct Family {
    parent: Remote,
    batches: Vec<OnceLock<Batch>>,
}

/// The forks of one request, or the failure of the request.
type Batch = Result<Vec<Result<Created, Failure>>, Failure>;

/// One fork in a response. Exactly one of the fields is set.
#[derive(Deserialize)]
struct Fork {
    sandbox: Option<Created>,
    error: Option<serde_json::Value>,
}

impl Forks {
    /// `parent` contains the steps that prepare the parent of each round, and `starts` is the number of forks in a
    /// round.
    #[must_use]
    pub fn new(e2b: E2b, parent: Vec<ParentStep>, starts: u32) -> Self {
        Self {
            e2b,
            parent,
            starts,
            family: RwLock::new(None),
        }
    }

    fn new_family(&self) -> Result<Family, Failure> {
        let mut parent = self.e2b.start(&mut Timeline::default())?;
        for step in &self.parent {
            match step {
                ParentStep::Run(command) => exec_and_compare(&mut parent, command)?,
                ParentStep::Upload { file, to } => parent.upload(file, to)?,
            }
        }
        let batches = self.starts.div_ceil(BATCH);
        Ok(Family {
            parent,
            batches: (0..batches).map(|_| OnceLock::new()).collect(),
        })
    }

    /// The forks of a batch; `None` if the round has no such batch. The first caller sends the request. A server
    /// handles one fork request per sandbox at a time, so batches are requested one after the other.
    fn batch<'a>(&self, family: &'a Family, index: usize) -> Option<&'a Batch> {
        let batch = family.batches.get(index)?;
        Some(batch.get_or_init(|| {
            if let Some(before) = index.checked_sub(1) {
                self.batch(family, before);
            }
            let earlier = BATCH.saturating_mul(u32::try_from(index).unwrap_or(u32::MAX));
            self.fork(
                &family.parent.created.sandbox_id,
                self.starts.saturating_sub(earlier).min(BATCH),
            )
        }))
    }

    fn fork(&self, parent: &str, count: u32) -> Batch {
        let mut client = self.e2b.connect(&self.e2b.api.control)?;
        let path = format!("/sandboxes/{parent}/fork");
        let body = json!({ "count": count, "timeout": LIFETIME_S }).to_string();
        let answer = self
            .e2b
            .api
            .request(&mut client, "POST", &path, body.as_bytes())
            .map_err(|e| guest::failure(FailureCause::Create, &e))?;
        forks(&answer)
    }
}

fn forks(answer: &HttpAnswer) -> Batch {
    let refused = |why: String| {
        let text = String::from_utf8_lossy(&answer.body);
        let text: String = text.chars().take(300).collect();
        fork_failure(format!("status {}{why}: {text}", answer.status))
    };
    if answer.status != 201 {
        return Err(refused(String::new()));
    }
    let forks: Vec<Fork> =
        serde_json::from_slice(&answer.body).map_err(|e| refused(format!(", {e}")))?;
    Ok(forks.into_iter().map(one).collect())
}

fn one(fork: Fork) -> Result<Created, Failure> {
    let error = fork.error.unwrap_or_default();
    let created = fork
        .sandbox
        .ok_or_else(|| fork_failure(error.to_string()))?;
    match created.check() {
        Ok(()) => Ok(created),
        Err(why) => Err(fork_failure(why.to_owned())),
    }
}

fn fork_failure(what: String) -> Failure {
    Failure {
        cause: FailureCause::Create,
        message: format!("fork: {what}"),
    }
}

impl Target for Forks {
    fn create(&self, id: CloneId, timeline: &mut Timeline) -> Result<Box<dyn Sandbox>, Failure> {
        let family = self
            .family
            .read()
            .map_err(|e| fork_failure(e.to_string()))?;
        let none = || fork_failure("the response has no fork for this arrival".to_owned());
        let family = family.as_ref().ok_or_else(none)?;
        let place = |n: u32| usize::try_from(n).unwrap_or(usize::MAX);
        let batch = self
            .batch(family, place(id.arrival / BATCH))
            .ok_or_else(none)?;
        timeline.stamp(StartPhase::Replied, clock::monotonic_ns());
        let forks = batch.as_ref().map_err(Clone::clone)?;
        let fork = forks.get(place(id.arrival % BATCH)).ok_or_else(none)?;
        Ok(Box::new(self.e2b.remote(fork.clone()?)))
    }

    fn prepare_cache(&self, wanted: PageCache) -> std::io::Result<()> {
        self.e2b.prepare_cache(wanted)
    }

    fn cpu_ns(&self) -> Option<u64> {
        self.e2b.cpu_ns()
    }

    fn pool(&self) -> Option<Pool> {
        self.e2b.pool()
    }

    fn await_ready(&self) -> std::io::Result<()> {
        self.e2b.await_ready()
    }

    fn begin_round(&self) -> Result<(), Failure> {
        let mut family = self
            .family
            .write()
            .map_err(|e| fork_failure(e.to_string()))?;
        // Kill the parent of the previous round before creating the next parent.
        *family = None;
        *family = Some(self.new_family()?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_forks_and_whole_requests_can_fail() {
        let answer = |status, body: &str| HttpAnswer {
            status,
            headers: Vec::new(),
            body: body.as_bytes().to_vec(),
        };
        let two = answer(
            201,
            r#"[{"sandbox":{"sandboxID":"i1"}},{"error":{"code":503,"message":"no room"}},
                {"sandbox":{"sandboxID":"../x"}}]"#,
        );
        let each = forks(&two).unwrap();
        assert_eq!(each[0].as_ref().unwrap().check(), Ok(()));
        assert!(each[1].as_ref().unwrap_err().message.contains("no room"));
        assert!(each[2].is_err());
        for (status, body) in [(409, "{}"), (201, "{}"), (200, "[]")] {
            assert!(forks(&answer(status, body)).is_err(), "{status} {body}");
        }
    }
}
