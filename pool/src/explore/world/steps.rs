//! The possible steps, and their effects.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::{
    Bounds, Disk, Job, MAX_SAVED, NOW, Place, Request, Step, Told, Violation, World, violated,
};
use crate::{
    record::Kept,
    recover::{Fate, Left, fate},
    slot::{Effects, Event, Next, Operation, Slot, Stage, decide, transition},
};

impl World {
    /// All steps that are possible now.
    pub(in crate::explore) fn steps(&self) -> Vec<Step> {
        let mut steps = self.internal();
        let Bounds {
            creates,
            requests,
            failures,
            crashes,
            ..
        } = self.bounds;
        if self.up && creates > 0 {
            steps.push(Step::Create);
        }
        if crashes > 0 && self.up {
            steps.push(Step::Crash);
        }
        if self.bounds.closes && self.up && !self.closing {
            steps.push(Step::Close);
        }
        for (at, place) in self.places.iter().enumerate() {
            let is_watched = place.slot.is_none_or(|slot| slot.vm);
            if failures > 0 && place.vm && is_watched && !place.doomed {
                steps.push(Step::Exit(at));
            }
            let Some(slot) = place.slot.filter(|_| self.up) else {
                continue;
            };
            if requests > 0 && place.told == Told::Exists && place.waiting.is_none() {
                steps.extend(Request::ALL.map(|request| Step::Request(at, request)));
            }
            if slot.due().is_some() {
                steps.push(Step::Deadline(at));
            }
            if failures > 0 {
                let failed = place.failures().into_iter();
                steps.extend(failed.map(|event| Step::Report(at, event)));
            }
        }
        steps
    }

    /// Steps that happen without a request, a failure or a crash.
    pub(super) fn internal(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        if !self.up {
            steps.push(Step::Recover);
            return steps;
        }
        for (at, place) in self.places.iter().enumerate() {
            if place.leftover {
                steps.push(Step::Sweep(at));
            }
            if place.doomed {
                steps.push(Step::Exit(at));
            }
            let Some(slot) = place.slot else { continue };
            if place.next_work() {
                steps.push(Step::Work(at));
            }
            let reports = place.success().or(place.must_fail());
            steps.extend(reports.map(|event| Step::Report(at, event)));
            if slot.writing {
                steps.push(Step::Report(at, Event::WriteDone));
            }
            if slot.vm && !place.vm {
                steps.push(Step::Exited(at));
            }
        }
        steps
    }

    /// The state after a step.
    ///
    /// # Errors
    /// Returns the property that the step violates.
    pub(in crate::explore) fn take(&self, step: Step) -> Result<Self, Violation> {
        let is_internal = match step {
            Step::Exit(at) => self.places[at].doomed,
            Step::Report(at, event) => {
                let place = &self.places[at];
                let ends = [place.success(), place.must_fail(), Some(Event::WriteDone)];
                ends.contains(&Some(event))
            }
            _ => true,
        };
        let mut next = self.clone();
        match step {
            Step::Create => {
                next.bounds.creates -= 1;
                next.queued += 1;
            }
            Step::Request(at, request) => {
                next.bounds.requests -= 1;
                next.request(at, request)?;
            }
            Step::Deadline(at) => next.expire(at)?,
            Step::Work(at) => next.places[at].work(),
            Step::Report(at, event) => {
                next.bounds.failures -= u8::from(!is_internal);
                next.report(at, event)?;
            }
            Step::Exit(at) => {
                next.bounds.failures -= u8::from(!is_internal);
                next.exit(at);
            }
            Step::Exited(at) => next.apply(at, Event::VmExited)?,
            Step::Sweep(at) => {
                let place = &mut next.places[at];
                place.vm = false;
                place.disk.dir = false;
                place.leftover = false;
            }
            Step::Close => {
                next.closing = true;
                for at in 0..next.places.len() {
                    if next.places[at].slot.is_some_and(|slot| !slot.is_leased()) {
                        next.apply(at, Event::Kill)?;
                    }
                }
            }
            Step::Crash => {
                next.bounds.crashes -= 1;
                next.crash();
            }
            Step::Recover => next.recover()?,
        }
        if next.up {
            next.settle()?;
        }
        next.places.retain(|place| !place.is_empty());
        // The order of slots has no meaning, so states that differ only in the order are equal.
        next.places.sort_by_cached_key(|place| {
            let mut hasher = DefaultHasher::new();
            place.hash(&mut hasher);
            hasher.finish()
        });
        Ok(next)
    }

    /// Applies an event, and then does the driver's work after it.
    pub(super) fn apply(&mut self, at: usize, event: Event) -> Result<(), Violation> {
        let place = &mut self.places[at];
        let Some(before) = place.slot else {
            return violated("a report is about a slot");
        };
        let Ok((next, effects)) = transition(before, event, NOW) else {
            return violated("every report of a job is accepted");
        };
        place.slot = Some(next);
        if next.job != before.job || next.cleaning != before.cleaning {
            place.job = Job::of(&next).map(|job| (job, 0));
        }
        if event == Event::Lease {
            place.leases += 1;
        }
        if next.stage == Stage::Running && place.told == Told::Nothing {
            place.told = Told::Exists;
            place.serves_create = false;
        }
        if next.stage == Stage::Ending && place.told == Told::Exists {
            let is_cause = matches!(event, Event::Kill | Event::VmExited | Event::Failed);
            // Otherwise the job has outlived the VM.
            if !is_cause && before.vm {
                return violated("a sandbox ends only by a kill, its deadline or its VM");
            }
            if !is_cause && matches!(before.stage, Stage::ResumeQueued(_) | Stage::Resuming(_)) {
                return violated("a failed resume leaves the sandbox paused");
            }
            place.told = Told::Ending;
        }
        self.perform(at, effects)
    }

    fn perform(&mut self, at: usize, effects: Effects) -> Result<(), Violation> {
        let place = &mut self.places[at];
        place.doomed |= effects.kill_vm && place.vm;
        if effects.clean && place.vm {
            return violated("only a slot without a VM is cleaned");
        }
        if effects.remove {
            if place.vm || place.disk.dir {
                return violated("a removed slot leaves nothing");
            }
            place.slot = None;
            place.waiting = None;
            if place.told != Told::Nothing {
                place.told = Told::Ended;
            }
        }
        Ok(())
    }

    /// Effects of a job that reports this event, in addition to its steps.
    fn report(&mut self, at: usize, event: Event) -> Result<(), Violation> {
        let place = &mut self.places[at];
        let job = place.job.map(|(job, _)| job);
        match (job, event) {
            // A failed start has killed its VM.
            (
                Some(Job::Fill | Job::Start | Job::Resume),
                Event::Failed | Event::ResumeFailed(_),
            ) => {
                place.vm = false;
            }
            // A failed pause is undone. The end of a write removes the files of an earlier pause.
            (Some(Job::Pause(_)), Event::PauseFailed | Event::Failed) | (_, Event::WriteDone) => {
                place.disk.record = Some(Kept::Running);
                place.disk.files = false;
            }
            (Some(Job::Adopt), Event::Adopted) => place.disk.files = false,
            _ => {}
        }
        self.apply(at, event)
    }

    /// If a VM is ended together with its sandbox, the record is removed first.
    fn exit(&mut self, at: usize) {
        let place = &mut self.places[at];
        if place.doomed && place.stage() == Some(Stage::Ending) && place.disk.record.is_some() {
            place.disk.record = None;
        } else {
            place.vm = false;
            place.doomed = false;
        }
    }

    pub(super) fn request(&mut self, at: usize, request: Request) -> Result<(), Violation> {
        let Some(slot) = self.places[at].slot else {
            return Ok(());
        };
        match decide(&slot, request.operation(), NOW) {
            Err(_) => Ok(()),
            Ok(Next::Wait) => {
                self.places[at].waiting = Some(request);
                Ok(())
            }
            Ok(Next::Grant) => match request {
                Request::SetTimeout | Request::Connect if !slot.writing => {
                    self.apply(at, Event::WriteBegun)
                }
                _ => Ok(()),
            },
            Ok(Next::Begin(event)) => self.begin(at, event),
        }
    }

    pub(super) fn begin(&mut self, at: usize, event: Event) -> Result<(), Violation> {
        let is_saved = |place: &&Place| place.slot.is_some_and(|slot| slot.is_saved());
        let saved = self.places.iter().filter(is_saved).count();
        match (event, self.places[at].stage()) {
            // Refused for lack of room.
            (Event::Pause(_), _) if saved >= MAX_SAVED => Ok(()),
            (Event::Kill, Some(Stage::Paused(_))) => {
                self.places[at].disk.record = None;
                self.apply(at, event)
            }
            _ => self.apply(at, event),
        }
    }

    fn expire(&mut self, at: usize) -> Result<(), Violation> {
        let Some((slot, due)) = self.places[at]
            .slot
            .and_then(|slot| Some((slot, slot.due()?)))
        else {
            return Ok(());
        };
        match decide(&slot, Operation::Expire, due) {
            Ok(Next::Begin(event)) => self.begin(at, event),
            _ => violated("a deadline that has passed is acted upon"),
        }
    }

    fn crash(&mut self) {
        self.up = false;
        self.closing = false;
        self.queued = 0;
        for place in &mut self.places {
            place.slot = None;
            place.job = None;
            place.doomed = false;
            place.leftover = false;
            place.serves_create = false;
            place.waiting = None;
        }
    }

    /// The next server reads the disk.
    fn recover(&mut self) -> Result<(), Violation> {
        self.up = true;
        let lifetime = self.lifetime;
        for place in &mut self.places {
            let Disk { record, files, .. } = place.disk;
            let fate = record.map_or(Fate::Remove, |kept| {
                let (vm, rest) = (place.vm, place.vm);
                fate(Left {
                    kept,
                    vm,
                    files,
                    rest,
                })
            });
            match fate {
                Fate::Recover(_) if place.told == Told::Ended => {
                    return violated("a sandbox that has ended does not come back");
                }
                Fate::Recover(stage) => {
                    let slot = Slot::recovered(stage, lifetime);
                    place.slot = Some(slot);
                    place.job = Job::of(&slot).map(|job| (job, 0));
                    place.told = Told::Exists;
                    place.leases = 1;
                }
                Fate::Remove if place.told == Told::Exists => {
                    return violated("every sandbox is recovered or reported");
                }
                Fate::Lose if can_go_on(place) => {
                    return violated("no sandbox is given up that can go on");
                }
                Fate::Remove | Fate::Lose => {
                    place.leftover = true;
                    place.told = Told::Ended;
                }
            }
        }
        Ok(())
    }
}

fn can_go_on(place: &Place) -> bool {
    match place.disk.record {
        Some(Kept::Running) => place.vm,
        Some(Kept::Paused(_)) => place.disk.files,
        Some(Kept::Nobody) | None => false,
    }
}
