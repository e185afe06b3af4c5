//! Work on the pool, started here and reported back as [`Finished`].

use super::*;
use api_types::rest::NetworkConfig;
use netisolation::Policy;
use pool::{PauseMode, TemplateInfo};
use tokio::sync::oneshot;

use crate::registry::{RouteError, message::Token};

/// On whose behalf a sandbox is paused or ended.
pub(super) enum By {
    /// This one waits for the answer.
    Client(Reply<()>),
    /// Nobody waits.
    Deadline,
    /// Its create was answered to nobody, or its record does not read.
    Unowned,
}

/// On whose behalf a sandbox is brought back.
pub(super) enum Waker {
    Client { wake: Wake, reply: Reply<Connected> },
    Traffic(oneshot::Sender<Result<Route, RouteError>>),
}

/// An answer that is due when a note is on disk.
pub(super) enum Owed {
    Adjusted(Reply<()>),
    Connected(Box<Connected>, Reply<Connected>),
}

/// Outbound options as they were asked for.
pub(super) struct Outbound {
    pub(super) options: Box<NetworkConfig>,
    pub(super) allow_internet_access: Option<bool>,
}

/// What came of a piece of work.
pub(super) enum Finished {
    Created {
        note: Box<Note>,
        result: Result<pool::Sandbox, PoolError>,
        reply: Reply<Created>,
    },
    Paused {
        id: SandboxId,
        result: Result<(), PoolError>,
        by: By,
    },
    Resumed {
        id: SandboxId,
        timeout_s: u32,
        result: Box<Result<pool::Sandbox, PoolError>>,
        waker: Waker,
    },
    Ended {
        id: SandboxId,
        result: Result<(), PoolError>,
        by: By,
    },
    Snapshotted {
        id: SandboxId,
        result: Result<TemplateInfo, PoolError>,
        reply: Reply<TemplateInfo>,
    },
    Forked {
        id: SandboxId,
        notes: Vec<Note>,
        result: Result<Vec<Result<pool::Sandbox, PoolError>>, PoolError>,
        reply: Reply<Vec<Result<View, RegistryError>>>,
    },
    PolicySet {
        id: SandboxId,
        outbound: Outbound,
        result: Result<(), PoolError>,
        reply: Reply<()>,
    },
    Saved {
        id: SandboxId,
        result: Result<(), PoolError>,
    },
}

impl Driver {
    pub(super) fn start_create(&mut self, lease: NewLease, reply: Reply<Created>) {
        let (template, policy) = (lease.template.clone(), lease.policy.clone());
        let prepared = note_of(lease, now()).and_then(|note| {
            let text = note.to_text()?;
            Ok((note, text))
        });
        let (note, text) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return drop(reply.send(Err(error))),
        };
        let spec = CreateSpec {
            template,
            init: note.init(),
            note: text,
            policy,
        };
        let pool = self.pool.clone();
        self.work.spawn(async move {
            let result = pool.create(spec).await;
            let note = Box::new(note);
            Finished::Created {
                note,
                result,
                reply,
            }
        });
    }

    pub(super) fn start_pause(&mut self, id: SandboxId, mode: PauseMode, by: By) {
        let pool = self.pool.clone();
        self.work.spawn(async move {
            let result = pool.pause(&id, mode).await;
            Finished::Paused { id, result, by }
        });
    }

    pub(super) fn start_kill(&mut self, id: SandboxId, by: By) {
        self.tokens = None;
        let pool = self.pool.clone();
        self.work.spawn(async move {
            let result = pool.kill(&id).await;
            Finished::Ended { id, result, by }
        });
    }

    pub(super) fn end_unowned(&mut self, id: SandboxId) {
        self.start_kill(id, By::Unowned);
    }

    pub(super) fn start_resume(&mut self, id: SandboxId, timeout_s: Option<u32>, waker: Waker) {
        let Some(entry) = self.book.get(&id) else {
            return;
        };
        let timeout_s = timeout_s.unwrap_or_else(|| entry.note.wake_timeout_s());
        let init = entry.note.init();
        let pool = self.pool.clone();
        self.work.spawn(async move {
            let result = match waker {
                Waker::Client { .. } => pool.resume(&id, init).await,
                Waker::Traffic(_) => pool.wake(&id, init).await,
            };
            let result = Box::new(result);
            Finished::Resumed {
                id,
                timeout_s,
                result,
                waker,
            }
        });
    }

    pub(super) fn start_snapshot(
        &mut self,
        id: SandboxId,
        names: Vec<String>,
        reply: Reply<TemplateInfo>,
    ) {
        let pool = self.pool.clone();
        self.work.spawn(async move {
            let result = pool.snapshot(&id, names).await;
            Finished::Snapshotted { id, result, reply }
        });
    }

    /// Forks have the source's settings, and tokens of their own.
    pub(super) fn start_fork(
        &mut self,
        id: SandboxId,
        count: u32,
        timeout_s: u32,
        reply: Reply<Vec<Result<View, RegistryError>>>,
    ) {
        let Some(entry) = self.book.get(&id) else {
            return;
        };
        let source = entry.note.clone();
        let forks: Result<Vec<_>, RegistryError> = (0..count)
            .map(|_| {
                let note = fork_note(&source, timeout_s, now())?;
                let text = note.to_text()?;
                Ok((note, text))
            })
            .collect();
        let forks = match forks {
            Ok(forks) => forks,
            Err(error) => {
                self.settle(&id, Outcome::Failed);
                return drop(reply.send(Err(error)));
            }
        };
        let template = entry.template.id.clone();
        let (notes, specs): (Vec<_>, Vec<_>) = forks
            .into_iter()
            .map(|(fork, text)| {
                let init = fork.init();
                let template = template.clone();
                let spec = CreateSpec {
                    template,
                    init,
                    note: text,
                    // The pool's: that of the source.
                    policy: Policy::default(),
                };
                (fork, spec)
            })
            .unzip();
        let pool = self.pool.clone();
        self.work.spawn(async move {
            let result = pool.fork(&id, specs).await;
            Finished::Forked {
                id,
                notes,
                result,
                reply,
            }
        });
    }

    /// Has the pool put a policy in force; the options that it comes from are noted when that is done.
    pub(super) fn start_set_policy(
        &mut self,
        id: SandboxId,
        policy: Policy,
        outbound: Outbound,
        reply: Reply<()>,
    ) {
        let pool = self.pool.clone();
        self.work.spawn(async move {
            let result = pool.set_policy(&id, policy).await;
            Finished::PolicySet {
                id,
                outbound,
                result,
                reply,
            }
        });
    }

    /// Writes the note as it is now; one that is being written is followed by this one.
    pub(super) fn save(&mut self, id: SandboxId, owed: Option<Owed>) {
        if let Some(saving) = self.saving.get_mut(&id) {
            saving.again = true;
            saving.next.extend(owed);
            return;
        }
        let saving = Saving {
            now: owed.into_iter().collect(),
            ..Saving::default()
        };
        self.saving.insert(id.clone(), saving);
        self.start_save(id);
    }

    pub(super) fn start_save(&mut self, id: SandboxId) {
        let text = self.book.get(&id).map(|entry| entry.note.to_text());
        let pool = self.pool.clone();
        self.work.spawn(async move {
            let result = match text {
                Some(Ok(text)) => pool.annotate(&id, text).await,
                Some(Err(error)) => Err(PoolError::Failed {
                    what: "the sandbox's record cannot be written",
                    why: error.to_string(),
                }),
                None => Err(PoolError::NoSandbox(id.clone())),
            };
            Finished::Saved { id, result }
        });
    }
}

fn note_of(lease: NewLease, now: UnixMs) -> Result<Note, RegistryError> {
    Ok(Note {
        started_at: now,
        end_at: end_of(now, lease.timeout_s),
        timeout_s: lease.timeout_s,
        at_deadline: lease.at_deadline,
        auto_resume: lease.auto_resume,
        metadata: lease.metadata,
        env_vars: lease.env_vars,
        envd_token: token(lease.envd_token)?,
        traffic_token: token(lease.traffic_token)?,
        allow_internet_access: lease.allow_internet_access,
        network: lease.network,
        mcp: lease.mcp,
    })
}

fn fork_note(source: &Note, timeout_s: u32, now: UnixMs) -> Result<Note, RegistryError> {
    let drawn_as = |token: &Option<String>| match token {
        Some(_) => Token::Drawn,
        None => Token::None,
    };
    Ok(Note {
        started_at: now,
        end_at: end_of(now, timeout_s),
        timeout_s,
        envd_token: token(drawn_as(&source.envd_token))?,
        traffic_token: token(drawn_as(&source.traffic_token))?,
        ..source.clone()
    })
}

/// 256 random bits in hex.
fn token(wanted: Token) -> Result<Option<String>, RegistryError> {
    match wanted {
        Token::None => Ok(None),
        Token::Drawn => Ok(Some(crate::auth::random_hex::<32>()?)),
    }
}
