//! What comes of work: the book is brought up to date, answers are given, those who waited are judged again.

use super::*;
use pool::TemplateInfo;

use crate::registry::message::route_error;

impl Driver {
    pub(super) fn finished(&mut self, finished: Result<Finished, JoinError>) {
        match finished {
            Ok(Finished::Created {
                note,
                result,
                reply,
            }) => self.created(*note, result, reply),
            Ok(Finished::Paused { id, result, by }) => self.paused(&id, result, by),
            Ok(Finished::Resumed {
                id,
                timeout_s,
                result,
                waker,
            }) => self.resumed(&id, timeout_s, *result, waker),
            Ok(Finished::Ended { id, result, by }) => self.killed(&id, result, by),
            Ok(Finished::Snapshotted { id, result, reply }) => {
                self.snapshotted(&id, result, reply);
            }
            Ok(Finished::Forked {
                id,
                notes,
                result,
                reply,
            }) => self.forked(&id, notes, result, reply),
            Ok(Finished::PolicySet {
                id,
                outbound,
                result,
                reply,
            }) => self.policy_set(id, outbound, result, reply),
            Ok(Finished::Saved { id, result }) => self.saved(id, result),
            Err(why) => error!(why = %why, "a task of the registry did not end well"),
        }
        self.answer_drains();
    }

    fn created(
        &mut self,
        note: Note,
        result: Result<pool::Sandbox, PoolError>,
        reply: Reply<Created>,
    ) {
        let sandbox = match result {
            Ok(sandbox) => sandbox,
            Err(error) => return drop(reply.send(Err(error.into()))),
        };
        let view = self.enter(note, &sandbox);
        let id = sandbox.id;
        let created = Created {
            view,
            timeline: sandbox.timeline,
            warm: sandbox.warm,
        };
        if reply.send(Ok(created)).is_err() {
            warn!(sandbox = %id, "the caller went away before its sandbox was there; it is ended");
            self.end_now(id);
        }
    }

    /// A sandbox that is new.
    fn enter(&mut self, note: Note, sandbox: &pool::Sandbox) -> View {
        let vm = self.vm_of(sandbox);
        let id = sandbox.id.clone();
        let template = sandbox.template.clone();
        let view = View {
            id: id.clone(),
            note: Arc::new(note),
            template: Arc::new(template),
            rest: Rest::Running,
        };
        self.book.insert(view.clone(), vm);
        self.tokens = None;
        self.tell(&id, "created");
        info!(sandbox = %id, template = %sandbox.template.id, warm = sandbox.warm, "created");
        view
    }

    /// Ends a sandbox that nobody knows.
    fn end_now(&mut self, id: SandboxId) {
        let verdict = self
            .book
            .ask(&id, super::super::lifecycle::Ask::Kill, now());
        if let Verdict::Start(_) = verdict {
            self.end_unowned(id);
        }
    }

    fn paused(&mut self, id: &SandboxId, result: Result<(), PoolError>, by: By) {
        let outcome = outcome_of(&result);
        match &result {
            Ok(()) => {
                info!(sandbox = %id, "paused");
                self.tell(id, "paused");
            }
            Err(why) => {
                error!(sandbox = %id, why = %why, "the pause failed");
                self.tell(id, &format!("the pause failed: {why}"));
            }
        }
        if let By::Client(reply) = by {
            drop(reply.send(result.map_err(Into::into)));
        }
        self.settle(id, outcome);
        if outcome == Outcome::Done {
            self.save(id.clone(), None);
        }
    }

    fn resumed(
        &mut self,
        id: &SandboxId,
        timeout_s: u32,
        result: Result<pool::Sandbox, PoolError>,
        waker: Waker,
    ) {
        let outcome = outcome_of(&result);
        match result {
            Ok(sandbox) => {
                let vm = self.vm_of(&sandbox);
                if let Some(entry) = self.book.get_mut(id) {
                    entry.vm = vm;
                    entry.wakes.succeed();
                }
                info!(sandbox = %id, "resumed");
                self.tell(id, "resumed");
                self.book.done(id, Outcome::Done, now());
                self.book.set_end(id, end_of(now(), timeout_s), timeout_s);
                self.answer_waker(id, waker);
                self.wake_waiting(id);
            }
            Err(error) => {
                warn!(sandbox = %id, why = %error, "the resume failed");
                self.tell(id, &format!("the resume failed: {error}"));
                if let Some(entry) = self.book.get_mut(id)
                    && is_its_own(&error)
                {
                    entry.wakes.fail(now());
                }
                let error = RegistryError::from(error);
                match waker {
                    Waker::Client { reply, .. } => drop(reply.send(Err(error))),
                    Waker::Traffic(reply) => drop(reply.send(Err(route_error(&error)))),
                }
                self.settle(id, outcome);
            }
        }
    }

    fn answer_waker(&mut self, id: &SandboxId, waker: Waker) {
        match waker {
            Waker::Traffic(reply) => {
                let route = self.route(id).ok_or(super::super::RouteError::NotFound);
                drop(reply.send(route));
                self.save(id.clone(), None);
            }
            Waker::Client { wake, reply } => {
                if let Wake::Resume {
                    auto_pause: Some(auto_pause),
                } = wake
                {
                    self.set_auto_pause(id, auto_pause);
                }
                let Some(view) = self.view(id) else {
                    return drop(reply.send(Err(RegistryError::NotFound(id.clone()))));
                };
                let connected = Connected {
                    view,
                    resumed: true,
                };
                let owed = Owed::Connected(Box::new(connected), reply);
                self.save(id.clone(), Some(owed));
            }
        }
    }

    fn set_auto_pause(&mut self, id: &SandboxId, auto_pause: bool) {
        if let Some(entry) = self.book.get_mut(id) {
            let note = Arc::make_mut(&mut entry.note);
            note.at_deadline = if auto_pause {
                Some(note.at_deadline.unwrap_or(pool::PauseMode::Memory))
            } else {
                None
            };
        }
    }

    fn killed(&mut self, id: &SandboxId, result: Result<(), PoolError>, by: By) {
        match &result {
            Ok(()) | Err(PoolError::NoSandbox(_)) => info!(sandbox = %id, "ended"),
            Err(why) => error!(sandbox = %id, why = %why, "a sandbox did not end cleanly"),
        }
        if let By::Client(reply) = by {
            drop(reply.send(result.map_err(Into::into)));
        }
        self.tokens = None;
        self.forget(id);
        self.settle(id, Outcome::Gone);
    }

    fn snapshotted(
        &mut self,
        id: &SandboxId,
        result: Result<TemplateInfo, PoolError>,
        reply: Reply<TemplateInfo>,
    ) {
        let outcome = outcome_of(&result);
        if let Ok(template) = &result {
            self.tell(id, &format!("snapshot {} was made", template.id));
        }
        drop(reply.send(result.map_err(Into::into)));
        self.settle(id, outcome);
    }

    fn forked(
        &mut self,
        id: &SandboxId,
        notes: Vec<Note>,
        result: Result<Vec<Result<pool::Sandbox, PoolError>>, PoolError>,
        reply: Reply<Vec<Result<View, RegistryError>>>,
    ) {
        let outcome = outcome_of(&result);
        let answer = result.map_err(RegistryError::from).map(|forks| {
            let forks = notes.into_iter().zip(forks);
            let views = forks.map(|(note, fork)| Ok(self.enter(note, &fork?)));
            views.collect::<Vec<_>>()
        });
        if let Err(answer) = reply.send(answer) {
            warn!(sandbox = %id, "the caller went away before its forks were there; they are ended");
            for fork in answer.into_iter().flatten().flatten() {
                self.end_now(fork.id);
            }
        }
        self.settle(id, outcome);
    }

    fn policy_set(
        &mut self,
        id: SandboxId,
        outbound: Outbound,
        result: Result<(), PoolError>,
        reply: Reply<()>,
    ) {
        match result {
            Ok(()) => {
                self.set_network(&id, outbound);
                self.tell(&id, "what it may reach was replaced");
                self.save(id, Some(Owed::Adjusted(reply)));
            }
            Err(error) => drop(reply.send(Err(error.into()))),
        }
    }

    fn saved(&mut self, id: SandboxId, result: Result<(), PoolError>) {
        let Some(saving) = self.saving.remove(&id) else {
            return;
        };
        if let Err(why) = &result
            && self.book.get(&id).is_some()
        {
            error!(sandbox = %id, why = %why, "a sandbox's record could not be written");
        }
        for owed in saving.now {
            pay(owed, &id, &result);
        }
        if saving.again {
            let saving = Saving {
                now: saving.next,
                ..Saving::default()
            };
            self.saving.insert(id.clone(), saving);
            self.start_save(id);
        }
    }

    /// The end of a change: those who waited for it are judged again.
    pub(super) fn settle(&mut self, id: &SandboxId, outcome: Outcome) {
        self.book.done(id, outcome, now());
        self.wake_waiting(id);
    }

    fn wake_waiting(&mut self, id: &SandboxId) {
        for message in self.waiting.remove(id).unwrap_or_default() {
            self.take(message);
        }
    }

    fn forget(&self, id: &SandboxId) {
        if let Some(refused) = &self.refused {
            refused.forget(id);
        }
    }

    /// A VM that ended unasked.
    pub(super) fn ended(&mut self, ended: &Ended) {
        warn!(sandbox = %ended.id, why = ended.why, "a sandbox ended by itself");
        self.tokens = None;
        self.forget(&ended.id);
        self.book.remove(&ended.id);
        self.wake_waiting(&ended.id);
    }
}

/// Gives an answer that was due.
fn pay(owed: Owed, id: &SandboxId, result: &Result<(), PoolError>) {
    let result = match result {
        Ok(()) => Ok(()),
        Err(PoolError::NoSandbox(_)) => Err(RegistryError::NotFound(id.clone())),
        Err(why) => Err(RegistryError::Pool(PoolError::Failed {
            what: "the sandbox's record could not be written",
            why: why.to_string(),
        })),
    };
    match owed {
        Owed::Adjusted(reply) => drop(reply.send(result)),
        Owed::Connected(connected, reply) => drop(reply.send(result.map(|()| *connected))),
    }
}

/// Whether a resume failed by the sandbox itself, and not for want of room on the host.
fn is_its_own(error: &PoolError) -> bool {
    match error {
        PoolError::Failed { .. } | PoolError::AgentSilent(_) => true,
        PoolError::NoTemplate(_)
        | PoolError::NoSandbox(_)
        | PoolError::WrongState { .. }
        | PoolError::Full { .. }
        | PoolError::NoSpace(_)
        | PoolError::TooManySaved(_)
        | PoolError::InUse(..)
        | PoolError::BadName(_)
        | PoolError::Closing => false,
    }
}

/// A sandbox that the pool does not know any more is gone; other failures leave it where it was.
fn outcome_of<T>(result: &Result<T, PoolError>) -> Outcome {
    match result {
        Ok(_) => Outcome::Done,
        Err(PoolError::NoSandbox(_)) => Outcome::Gone,
        Err(
            PoolError::NoTemplate(_)
            | PoolError::WrongState { .. }
            | PoolError::Full { .. }
            | PoolError::NoSpace(_)
            | PoolError::TooManySaved(_)
            | PoolError::InUse(..)
            | PoolError::BadName(_)
            | PoolError::Failed { .. }
            | PoolError::AgentSilent(_)
            | PoolError::Closing,
        ) => Outcome::Failed,
    }
}
