//! The sandboxes and snapshots that a server has created: at most as many as its limits allow. It reaches no others, and
//! ends them when it ends.

use std::{
    collections::BTreeMap,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use client::endpoint::Wire;
use envd::{ClientError, EnvdClient, guest_text};
use rest::{
    ForkRequest, ForkResult, NewSandbox, Sandbox, SandboxDetail, SnapshotInfo, SnapshotRequest,
};
use serde::de::DeserializeOwned;

use super::Limits;
use crate::{
    command_args::allow,
    failure::{Failure, Kind, Peer},
    run::{DEFAULT_TEMPLATE, unknown_template},
    server::{Server, segment},
};

const INTERPRETER_TEMPLATE: &str = "code-interpreter-v1";
/// Timeout of each request at the end, and of calls that are still running.
const FAREWELL: Duration = Duration::from_secs(10);

pub(super) struct Sandboxes {
    /// Each call has its own connection, because a kept one may have ended.
    server: Server,
    pub(super) limits: Limits,
    /// With the network policy.
    request: NewSandbox,
    owned: Mutex<Owned>,
    settled: Condvar,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owns {
    Sandbox,
    Snapshot,
}

#[derive(Debug, Default)]
struct Owned {
    ids: BTreeMap<String, Owns>,
    /// Number of those that are being created.
    pending: usize,
    /// Whether the server has begun to end.
    is_ending: bool,
}

impl Owned {
    /// Whether there is room for so many more, which are then pending.
    fn reserve(&mut self, what: Owns, count: usize, most: usize) -> bool {
        let present = self.ids.values().filter(|owns| **owns == what).count();
        let has_room = present + self.pending + count <= most;
        self.pending += if has_room { count } else { 0 };
        has_room
    }
}

impl Sandboxes {
    pub(super) fn of(server: Server, limits: &Limits) -> Result<Self, Failure> {
        let mut request = NewSandbox {
            timeout: i64::try_from(limits.timeout.as_secs()).ok(),
            ..NewSandbox::default()
        };
        allow("--allow", &limits.allowed(), &mut request)?;
        Ok(Self {
            server,
            limits: limits.clone(),
            request,
            owned: Mutex::default(),
            settled: Condvar::new(),
        })
    }

    fn owned(&self) -> MutexGuard<'_, Owned> {
        self.owned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates sandboxes or snapshots within the limits. `make` returns their ids.
    fn make<T>(
        &self,
        what: Owns,
        count: usize,
        make: impl FnOnce(&mut Server) -> Result<(Vec<String>, T), Failure>,
    ) -> Result<T, Failure> {
        let most = self.limits.max_sandboxes as usize;
        if !self.owned().reserve(what, count, most) {
            // Some may have reached their deadline.
            self.list()?;
            if !self.owned().reserve(what, count, most) {
                return Err(Failure::refused(format!(
                    "this server may have {most} sandboxes, and as many snapshots"
                ))
                .with_cure("`kill` a sandbox, or start `cube mcp` with a larger --max-sandboxes"));
            }
        }
        let mut server = self.server.another();
        let made = make(&mut server);
        let ids = made.as_ref().map_or(&[][..], |(ids, _)| ids.as_slice());
        let mut owned = self.owned();
        if owned.is_ending {
            drop(owned);
            remove(&mut server, ids.iter().map(|id| (id, &what)));
            owned = self.owned();
        } else {
            owned.ids.extend(ids.iter().map(|id| (id.clone(), what)));
        }
        owned.pending -= count;
        self.settled.notify_all();
        made.map(|(_, result)| result)
    }

    /// Creates a sandbox from one of this server's snapshots, or else from the template.
    pub(super) fn create(&self, snapshot: Option<&str>) -> Result<Sandbox, Failure> {
        let templates = match (snapshot, &self.limits.template) {
            (Some(id), _) => {
                self.check(Owns::Snapshot, id)?;
                vec![id]
            }
            (None, Some(template)) => vec![template.as_str()],
            (None, None) => vec![INTERPRETER_TEMPLATE, DEFAULT_TEMPLATE],
        };
        self.make(Owns::Sandbox, 1, |server| {
            let mut request = self.request.clone();
            let mut create = |template: &str| -> Result<Sandbox, Failure> {
                request.template_id = template.to_owned();
                server.post("/v2/sandboxes", &request)
            };
            let created = match (templates.as_slice(), create(templates[0])) {
                ([_, other], Err(why)) if why.kind == Kind::NotFound => create(other),
                (_, created) => created,
            };
            let created = created.map_err(unknown_template)?;
            Ok((vec![created.sandbox_id.clone()], created))
        })
    }

    /// Copies a running sandbox. Returns a line for each copy.
    pub(super) fn fork(&self, id: &str, count: u64) -> Result<Vec<String>, Failure> {
        self.check(Owns::Sandbox, id)?;
        let body = ForkRequest {
            timeout: self.request.timeout,
            count: i64::try_from(count).ok(),
        };
        let many = usize::try_from(count).unwrap_or(usize::MAX);
        self.make(Owns::Sandbox, many, |server| {
            let forked = server.post(&path(Owns::Sandbox, id, "/fork"), &body);
            let forks: Vec<ForkResult> = forked.map_err(|why| self.ended(id, why))?;
            let line = |fork: &ForkResult| match (&fork.sandbox, &fork.error) {
                (Some(made), _) => format!("sandbox: {}", made.sandbox_id),
                (None, Some(why)) => format!("failed: {}", guest_text(&why.message)),
                (None, None) => "failed".to_owned(),
            };
            let lines = forks.iter().map(line).collect();
            let ids = forks
                .into_iter()
                .filter_map(|fork| Some(fork.sandbox?.sandbox_id));
            Ok((ids.collect(), lines))
        })
    }

    /// Returns the id of the snapshot.
    pub(super) fn snapshot(&self, id: &str) -> Result<String, Failure> {
        self.check(Owns::Sandbox, id)?;
        self.make(Owns::Snapshot, 1, |server| {
            let body = SnapshotRequest {
                name: None,
                memory: None,
            };
            let made = server.post(&path(Owns::Sandbox, id, "/snapshots"), &body);
            let made: SnapshotInfo = made.map_err(|why| self.ended(id, why))?;
            Ok((vec![made.snapshot_id.clone()], made.snapshot_id))
        })
    }

    pub(super) fn kill(&self, id: &str) -> Result<(), Failure> {
        self.check(Owns::Sandbox, id)?;
        let killed = self.server.another().delete(&path(Owns::Sandbox, id, ""));
        killed.map_err(|why| self.ended(id, why))?;
        self.owned().ids.remove(id);
        Ok(())
    }

    /// The sandboxes of this server that have not ended.
    pub(super) fn list(&self) -> Result<Vec<SandboxDetail>, Failure> {
        let ids = self.owned().ids.clone();
        let ids = ids.iter().filter(|(_, what)| **what == Owns::Sandbox);
        let found = ids.map(|(id, _)| match self.get(id, "") {
            Err(why) if why.kind == Kind::NotFound => Ok(None),
            found => found.map(Some),
        });
        found.filter_map(Result::transpose).collect()
    }

    /// Reads a property of a sandbox.
    pub(super) fn get<T: DeserializeOwned>(&self, id: &str, property: &str) -> Result<T, Failure> {
        self.check(Owns::Sandbox, id)?;
        let found = self
            .server
            .another()
            .get(&path(Owns::Sandbox, id, property));
        found.map_err(|why| self.ended(id, why))
    }

    /// Calls the program at a port of a sandbox, which lives as long as the call may take.
    pub(super) fn call<T>(
        &self,
        id: &str,
        port: u16,
        time: Duration,
        call: impl FnOnce(&mut EnvdClient<Wire>) -> Result<T, ClientError>,
    ) -> Result<T, Failure> {
        self.check(Owns::Sandbox, id)?;
        let mut server = self.server.another();
        let route = server.find_for(id, time + self.limits.timeout);
        let route = route.map_err(|why| self.ended(id, why))?.at_port(port)?;
        let mut client = server.agent(&route)?;
        client.set_timeout(time);
        call(&mut client).map_err(|why| {
            let is_late = match &why {
                ClientError::Timeout(_) => true,
                ClientError::Refused { code, .. } => code == "deadline_exceeded",
                ClientError::NotReachable { .. }
                | ClientError::Local { .. }
                | ClientError::Protocol(_) => false,
            };
            if !is_late {
                return Failure::of_call(&why, &Peer::Sandbox(id));
            }
            let time = humantime::format_duration(time);
            Failure::refused(format!("it took longer than {time} and was ended"))
                .with_cure("use a larger timeout_s")
        })
    }

    fn check(&self, what: Owns, id: &str) -> Result<(), Failure> {
        if self.owned().ids.get(id) == Some(&what) {
            return Ok(());
        }
        let id = guest_text(id);
        Err(match what {
            Owns::Sandbox => Failure::refused(format!("this server has no sandbox {id:?}"))
                .with_cure("`list` shows its sandboxes, `create` makes one"),
            Owns::Snapshot => Failure::refused(format!("this server has no snapshot {id:?}"))
                .with_cure("`snapshot` makes one and returns its id"),
        })
    }

    /// Forgets a sandbox that the API server does not have any more.
    fn ended(&self, id: &str, why: Failure) -> Failure {
        if why.kind != Kind::NotFound {
            return why;
        }
        self.owned().ids.remove(id);
        Failure::new(Kind::NotFound, format!("sandbox {id} has ended"))
            .with_cure("`create` makes another one")
    }

    /// Ends everything that this server has created, also by calls that are still running.
    pub(super) fn end(&self) {
        let ids = {
            let mut owned = self.owned();
            owned.is_ending = true;
            owned.ids.clone()
        };
        remove(&mut self.server.another().within(FAREWELL), &ids);
        let is_pending = |owned: &mut Owned| owned.pending > 0;
        let _late_ones_end_at_their_timeout =
            self.settled
                .wait_timeout_while(self.owned(), FAREWELL, is_pending);
    }
}

/// Removes sandboxes and snapshots, as many as possible.
fn remove<'a>(server: &mut Server, ids: impl IntoIterator<Item = (&'a String, &'a Owns)>) {
    for (id, what) in ids {
        match server.delete(&path(*what, id, "")) {
            Err(why) if why.kind != Kind::NotFound => {
                eprintln!("cube: cannot remove {id}: {why}");
                if why.kind == Kind::Unreachable {
                    return;
                }
            }
            Ok(()) | Err(_) => {}
        }
    }
}

fn path(what: Owns, id: &str, property: &str) -> String {
    let collection = match what {
        Owns::Sandbox => "sandboxes",
        Owns::Snapshot => "templates",
    };
    format!("/{collection}/{}{property}", segment(id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_are_being_created_count() {
        let mut owned = Owned::default();
        assert!(owned.reserve(Owns::Sandbox, 2, 3) && !owned.reserve(Owns::Sandbox, 2, 3));
        assert!(owned.reserve(Owns::Sandbox, 1, 3));
        (owned.ids, owned.pending) = ([("a".to_owned(), Owns::Sandbox)].into(), 0);
        assert!(!owned.reserve(Owns::Sandbox, 3, 3) && owned.reserve(Owns::Snapshot, 3, 3));
    }
}
