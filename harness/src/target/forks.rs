//! Forks through E2B's API: each round has a parent sandbox that has done some work, and the clones of the round
//! are forks of it, asked for by `POST /sandboxes/{id}/fork`.
//!
//! One request makes many forks. The first worker that needs one of a batch asks for the whole batch, the
//! others wait for its answer; that wait is inside their latency.

use std::sync::{OnceLock, RwLock};

use api_types::envd::HttpAnswer;
use model::{StartPhase, Timeline};
use serde::Deserialize;
use serde_json::json;
use testbed::api::Created;

use super::{
    CloneId, PageCache, Sandbox, Target,
    e2b::{E2b, LIFETIME_S, Remote},
    exec_and_compare,
};
use crate::{
    clock,
    event::{Failure, FailureCause},
    guest,
    scenario::ParentStep,
};

/// Forks of one request. Servers bound it; ours takes 64.
const BATCH: u32 = 50;

/// Starts forks, `starts` in each round.
#[derive(Debug)]
pub struct Forks {
    e2b: E2b,
    parent: Vec<ParentStep>,
    starts: u32,
    /// Written between rounds, read by workers.
    family: RwLock<Option<Family>>,
}

/// One round's.
#[derive(Debug)]
struct Family {
    parent: Remote,
    batches: Vec<OnceLock<Batch>>,
}

/// The forks of a request, or why there are none.
type Batch = Result<Vec<Result<Created, Failure>>, Failure>;

/// One fork of an answer: exactly one of both is set.
#[derive(Deserialize)]
struct Fork {
    sandbox: Option<Created>,
    error: Option<serde_json::Value>,
}

impl Forks {
    /// `parent` is what is done to a round's parent first, `starts` how many forks a round has.
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

    /// The forks of the batch, asked for by whoever comes first. A server changes a sandbox once at a time, so
    /// batches follow one another.
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
        no_fork(format!("status {}{why}: {text}", answer.status))
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
    let created = fork.sandbox.ok_or_else(|| no_fork(error.to_string()))?;
    match created.check() {
        Ok(()) => Ok(created),
        Err(why) => Err(no_fork(why.to_owned())),
    }
}

fn no_fork(what: String) -> Failure {
    Failure {
        cause: FailureCause::Create,
        message: format!("fork: {what}"),
    }
}

impl Target for Forks {
    fn create(&self, id: CloneId, timeline: &mut Timeline) -> Result<Box<dyn Sandbox>, Failure> {
        let family = self.family.read().map_err(|e| no_fork(e.to_string()))?;
        let none = || no_fork("there is none for this arrival".to_owned());
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

    fn await_ready(&self) -> std::io::Result<()> {
        self.e2b.await_ready()
    }

    fn begin_round(&self) -> Result<(), Failure> {
        let mut family = self.family.write().map_err(|e| no_fork(e.to_string()))?;
        // The last round's parent ends before the next one is made.
        *family = None;
        *family = Some(self.new_family()?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forks_fail_one_by_one_or_all_together() {
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
