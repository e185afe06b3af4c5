//! Property tests of the state machine with random events: a model tracks what really exists and checks every step.

use proptest::prelude::*;

use super::*;
use crate::lifetime::OnTimeout;

/// A slot and its environment.
struct World {
    slot: Slot,
    now: UnixMs,
    /// Events with which the running job may end.
    job: Vec<Event>,
    vm: bool,
    writing: bool,
    dir: bool,
    ever_leased: bool,
    removed: bool,
}

/// A step of a test, as numbers that select one of the currently possible events.
#[derive(Clone, Debug)]
enum Step {
    Request(Operation),
    /// A job ends, the VM exits, a write ends, the cleaning ends.
    World(prop::sample::Index),
    Extend(u32),
    Set(u32),
    Pass(u64),
}

/// The events with which a job that begins in this stage may end.
fn ends_of(stage: Stage, had_vm: bool) -> Vec<Event> {
    use Event as E;
    use Stage as S;
    match stage {
        S::Filling => vec![E::Filled, E::Failed],
        S::Starting if had_vm => vec![E::Leased, E::Failed],
        S::Starting => vec![E::Started, E::Failed],
        S::Pausing(_) => vec![E::Saved, E::PauseFailed, E::Failed],
        S::Resuming(_) => vec![
            E::Resumed,
            E::ResumeFailed(FailedBy::Sandbox),
            E::ResumeFailed(FailedBy::Host),
        ],
        S::Snapshotting => vec![E::SnapshotDone, E::Failed],
        S::SnapshottingPaused(_) => vec![E::SnapshotDone],
        S::Adopting => vec![E::Adopted, E::Failed],
        S::AdoptingPaused(_) => vec![E::Adopted],
        S::Warm | S::Running | S::Stopping(_) | S::Paused(_) | S::ResumeQueued(_) | S::Ending => {
            Vec::new()
        }
    }
}

impl World {
    fn new(stage: Stage, lifetime: Lifetime) -> Self {
        let slot = Slot::recovered(stage, lifetime);
        Self {
            slot,
            now: 0,
            job: ends_of(stage, slot.vm),
            vm: slot.vm,
            writing: false,
            dir: true,
            ever_leased: stage != Stage::Filling,
            removed: false,
        }
    }

    fn running(lifetime: Lifetime) -> Self {
        let mut world = Self::new(Stage::Starting, lifetime);
        world.apply(Event::Started);
        world
    }

    fn apply(&mut self, event: Event) {
        let before = self.slot;
        let Ok((next, effects)) = transition(before, event, self.now) else {
            panic!("{before:?} refuses {event:?}");
        };
        if next.job && !before.job {
            assert!(self.job.is_empty(), "two jobs: {before:?} {event:?}");
            self.job = ends_of(next.stage, before.vm);
        }
        match event {
            Event::Filled | Event::Started | Event::Resumed => self.vm = true,
            Event::VmExited => self.vm = false,
            Event::WriteBegun => self.writing = true,
            Event::WriteDone => self.writing = false,
            Event::Cleaned => self.dir = false,
            _ => {}
        }
        if !next.job {
            self.job.clear();
        }
        assert_eq!(self.vm, next.vm, "{before:?} {event:?} {next:?}");
        let has_rest = self.vm || self.writing || !self.job.is_empty();
        assert!(!effects.clean || !has_rest, "{before:?} {event:?}");
        assert!(!effects.remove || !(has_rest || self.dir));
        // A slot serves one lease.
        self.ever_leased |= next.stage == Stage::Starting;
        assert!(!(self.ever_leased && next.stage == Stage::Warm));
        let is_unwanted = matches!(next.stage, Stage::Ending | Stage::Stopping(_));
        assert_eq!(effects.kill_vm, is_unwanted && next.vm && !next.writing);
        self.slot = next;
        self.removed = effects.remove;
    }

    /// Decides as the driver does, and begins the resulting change.
    fn request(&mut self, operation: Operation) -> Result<Next, Refusal> {
        let before = self.slot;
        let decided = decide(&before, operation, self.now);
        if let Ok(Next::Begin(event)) = decided {
            assert!(before.is_settled() || event == Event::Kill || !before.job);
            self.apply(event);
        }
        decided
    }

    /// Acts on an expired deadline, as the driver does. A pause may be refused for lack of space.
    fn expire(&mut self) {
        if self.slot.due().is_some_and(|due| due <= self.now) {
            let decided = self.request(Operation::Expire);
            assert!(matches!(decided, Ok(Next::Begin(_))), "{decided:?}");
            assert_eq!(self.slot.due(), None);
        }
    }

    /// Events that the environment may cause now.
    fn possible(&self) -> Vec<Event> {
        let mut events = self.job.clone();
        if self.vm {
            events.push(Event::VmExited);
        }
        if self.writing {
            events.push(Event::WriteDone);
        }
        if self.slot.cleaning {
            events.push(Event::Cleaned);
        }
        match self.slot.stage {
            Stage::Warm => events.push(Event::Lease),
            Stage::ResumeQueued(_) => {
                events.extend([Event::Resume, Event::ResumeFailed(FailedBy::Host)]);
            }
            _ => {}
        }
        events
    }

    /// Performs a step. Operations on a sandbox without a caller must be refused.
    fn step(&mut self, step: Step) {
        let is_leased = self.slot.is_leased();
        match step {
            Step::Request(operation) => {
                let decided = self.request(operation);
                if !is_leased {
                    assert_eq!(decided, Err(Refusal::NotFound));
                }
            }
            Step::World(index) => {
                let possible = self.possible();
                if !possible.is_empty() {
                    self.apply(*index.get(&possible));
                }
            }
            Step::Extend(timeout_s) => {
                if self.request(Operation::SetTimeout) == Ok(Next::Grant) {
                    let before = self.slot.lifetime.end_at;
                    self.slot.extend_deadline(self.now, timeout_s);
                    assert!(self.slot.lifetime.end_at >= before);
                    self.write();
                }
            }
            Step::Set(timeout_s) => {
                if self.request(Operation::SetTimeout) == Ok(Next::Grant) {
                    self.slot.set_deadline(self.now, timeout_s);
                    self.write();
                }
            }
            Step::Pass(ms) => {
                self.now += ms;
                self.expire();
            }
        }
    }

    fn write(&mut self) {
        if !self.slot.writing {
            self.apply(Event::WriteBegun);
        }
    }
}

fn operations() -> impl Strategy<Value = Operation> {
    prop::sample::select(vec![
        Operation::Connect(Wake::Connect),
        Operation::Connect(Wake::ConnectColdBoot),
        Operation::Connect(Wake::Resume { auto_pause: None }),
        Operation::Connect(Wake::ResumeColdBoot { auto_pause: None }),
        Operation::SetTimeout,
        Operation::SetPolicy,
        Operation::Pause(PauseMode::Memory),
        Operation::Pause(PauseMode::FilesystemOnly),
        Operation::Snapshot,
        Operation::Fork,
        Operation::MakeTemplate,
        Operation::Kill,
        Operation::SetClaim,
        Operation::Discard,
        Operation::Reach,
    ])
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => operations().prop_map(Step::Request),
        8 => any::<prop::sample::Index>().prop_map(Step::World),
        2 => (0..20_u32).prop_map(Step::Extend),
        2 => (0..20_u32).prop_map(Step::Set),
        3 => (0..9_000_u64).prop_map(Step::Pass),
    ]
}

fn lifetimes() -> impl Strategy<Value = Lifetime> {
    let on_timeout = prop::sample::select(vec![
        OnTimeout::End,
        OnTimeout::Pause(PauseMode::Memory),
        OnTimeout::Pause(PauseMode::FilesystemOnly),
    ]);
    (0..20_u32, on_timeout, any::<bool>()).prop_map(|(timeout_s, on_timeout, auto_resume)| {
        let mut lifetime = Lifetime {
            on_timeout,
            auto_resume,
            ..Lifetime::default()
        };
        lifetime.set(0, timeout_s);
        lifetime
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    /// In any order of requests and events the invariants hold, no deadline passes unnoticed, and a kill removes the
    /// slot in a few steps.
    #[test]
    fn every_life_can_be_ended_and_leaves_nothing(
        stage in prop::sample::select(vec![
            Stage::Filling,
            Stage::Starting,
            Stage::Adopting,
            Stage::AdoptingPaused(PauseMode::Memory),
        ]),
        lifetime in lifetimes(),
        steps in prop::collection::vec(steps(), 0..80),
    ) {
        let mut world = World::new(stage, lifetime);
        for step in steps {
            world.step(step);
            if world.removed {
                return Ok(());
            }
        }
        world.apply(Event::Kill);
        for _ in 0..8 {
            if world.removed {
                return Ok(());
            }
            if let Some(event) = world.possible().first().copied() {
                world.apply(event);
            }
        }
        prop_assert!(world.removed, "a slot stays: {:?}", world.slot);
    }
}

const ENDS: Lifetime = Lifetime {
    end_at: 1_000,
    timeout_s: 1,
    on_timeout: OnTimeout::End,
    auto_resume: false,
};
const PAUSES: Lifetime = Lifetime {
    on_timeout: OnTimeout::Pause(PauseMode::Memory),
    ..ENDS
};
const WAKES: Lifetime = Lifetime {
    auto_resume: true,
    ..PAUSES
};

fn paused(mode: PauseMode, lifetime: Lifetime) -> Slot {
    Slot::recovered(Stage::Paused(mode), lifetime)
}

#[test]
fn a_stage_refuses_events_of_others() {
    let (warm, _) = transition(Slot::new(Stage::Filling), Event::Filled, 0).unwrap();
    for event in [
        Event::Pause(PauseMode::Memory),
        Event::QueueResume,
        Event::Snapshot,
        Event::Filled,
        Event::WriteBegun,
    ] {
        assert_eq!(transition(warm, event, 0), Err(Unexpected), "{event:?}");
    }
    let paused = paused(PauseMode::Memory, ENDS);
    assert!(transition(paused, Event::Pause(PauseMode::Memory), 0).is_err());
    assert!(transition(paused, Event::Lease, 0).is_err());
    assert!(transition(paused, Event::WriteBegun, 0).is_err());
}

#[test]
fn a_deadline_ends_or_pauses() {
    let expire = |lifetime| World::running(lifetime).request(Operation::Expire);
    assert_eq!(expire(ENDS), Ok(Next::Begin(Event::Kill)));
    let pause = Event::Pause(PauseMode::Memory);
    assert_eq!(expire(PAUSES), Ok(Next::Begin(pause)));
}

#[test]
fn extending_never_shortens_and_setting_may() {
    let mut slot = World::running(ENDS).slot;
    slot.set_deadline(0, 60);
    assert!(!slot.extend_deadline(0, 10));
    assert_eq!(slot.due(), Some(60_000));
    assert!(slot.extend_deadline(5_000, 60));
    assert_eq!(slot.due(), Some(65_000));
    slot.set_deadline(5_000, 5);
    assert_eq!(slot.due(), Some(10_000));
}

#[test]
fn a_failed_automatic_pause_is_tried_again_and_keeps_traffic_out() {
    let mut world = World::running(PAUSES);
    world.now = 999;
    assert_eq!(world.request(Operation::Reach), Ok(Next::Grant));
    world.now = 1_000;
    world.expire();
    assert_eq!(world.slot.stage, Stage::Pausing(PauseMode::Memory));
    world.now = 1_500;
    world.apply(Event::PauseFailed);
    assert_eq!(world.slot.due(), Some(1_500 + PAUSE_AGAIN_MS));
    assert_eq!(world.request(Operation::Reach), Err(Refusal::NotFound));
    // A pause that was refused before its job began is postponed as well, and a new deadline takes effect immediately.
    world.now += PAUSE_AGAIN_MS;
    world.slot.postpone_pause(world.now);
    assert_eq!(world.slot.due(), Some(world.now + PAUSE_AGAIN_MS));
    world.slot.set_deadline(world.now, 2);
    assert_eq!(world.slot.due(), Some(world.now + 2_000));
    world.slot.postpone_pause(world.now);
    assert_eq!(world.slot.due(), Some(world.now + 2_000));
}

#[test]
fn a_snapshot_past_the_deadline_keeps_traffic_out_and_delays_the_end() {
    let mut world = World::running(ENDS);
    world.request(Operation::Snapshot).unwrap();
    world.now = 900;
    assert_eq!(world.request(Operation::Reach), Ok(Next::Grant));
    world.now = 1_000;
    assert_eq!(world.request(Operation::Reach), Err(Refusal::NotFound));
    assert_eq!(world.slot.due(), None);
    world.apply(Event::SnapshotDone);
    assert_eq!(world.slot.due(), Some(1_000));
}

#[test]
fn a_sandbox_stays_in_use_during_its_snapshot() {
    let mut world = World::running(ENDS);
    world.request(Operation::Fork).unwrap();
    for operation in [
        Operation::Reach,
        Operation::Connect(Wake::Connect),
        Operation::SetTimeout,
        Operation::SetPolicy,
    ] {
        assert_eq!(world.request(operation), Ok(Next::Grant), "{operation:?}");
    }
    let resume = Operation::Connect(Wake::Resume { auto_pause: None });
    assert_eq!(world.request(resume), Err(Refusal::AlreadyRunning));
    for operation in [
        Operation::Kill,
        Operation::Expire,
        Operation::Snapshot,
        Operation::Fork,
        Operation::MakeTemplate,
        Operation::Pause(PauseMode::Memory),
    ] {
        assert_eq!(world.request(operation), Ok(Next::Wait), "{operation:?}");
    }
}

#[test]
fn requests_for_a_sandbox_of_a_former_server_wait_until_it_is_verified() {
    for (stage, end) in [
        (Stage::Adopting, Stage::Running),
        (
            Stage::AdoptingPaused(PauseMode::Memory),
            Stage::Paused(PauseMode::Memory),
        ),
    ] {
        let mut world = World::new(stage, WAKES);
        for operation in [
            Operation::Reach,
            Operation::Connect(Wake::Connect),
            Operation::SetTimeout,
            Operation::SetPolicy,
            Operation::Fork,
            Operation::Pause(PauseMode::Memory),
        ] {
            assert_eq!(world.request(operation), Ok(Next::Wait), "{operation:?}");
        }
        world.now = WAKES.end_at;
        assert_eq!(world.slot.due(), None);
        world.apply(Event::Adopted);
        assert_eq!(world.slot.stage, end);
    }
    // An unresponsive VMM delays neither a kill nor the end after a failure.
    let mut silent = World::new(Stage::Adopting, ENDS);
    assert_eq!(
        silent.request(Operation::Kill),
        Ok(Next::Begin(Event::Kill))
    );
    let mut lost = World::new(Stage::Adopting, ENDS);
    lost.apply(Event::Failed);
    assert_eq!(lost.slot.stage, Stage::Ending);
    // The VM may exit before it is verified.
    let mut dead = World::new(Stage::Adopting, ENDS);
    dead.apply(Event::VmExited);
    dead.apply(Event::Adopted);
    assert_eq!(dead.slot.stage, Stage::Ending);
}

#[test]
fn traffic_resumes_only_what_has_its_memory_and_opted_in() {
    let reach = |mode, lifetime| decide(&paused(mode, lifetime), Operation::Reach, 0);
    let resume = Ok(Next::Begin(Event::QueueResume));
    assert_eq!(reach(PauseMode::Memory, WAKES), resume);
    assert_eq!(reach(PauseMode::Memory, PAUSES), Err(Refusal::NotFound));
    let disk = PauseMode::FilesystemOnly;
    assert_eq!(reach(disk, WAKES), Err(Refusal::NotFound));
}

#[test]
fn traffic_during_a_pause_waits_only_if_it_may_resume() {
    for (lifetime, decided) in [(WAKES, Ok(Next::Wait)), (PAUSES, Err(Refusal::NotFound))] {
        let mut world = World::running(lifetime);
        let pause = Operation::Pause(PauseMode::Memory);
        world.request(pause).unwrap();
        assert_eq!(world.request(Operation::Reach), decided);
        world.apply(Event::Saved);
        assert_eq!(world.request(Operation::Reach), decided);
        assert_eq!(world.request(Operation::Kill), Ok(Next::Wait));
    }
}

#[test]
fn a_resume_that_fails_by_the_sandbox_delays_traffic_and_not_clients() {
    let mut world = World::running(WAKES);
    for event in [
        Event::Pause(PauseMode::Memory),
        Event::Saved,
        Event::VmExited,
        Event::QueueResume,
        Event::ResumeFailed(FailedBy::Host),
    ] {
        world.apply(event);
    }
    assert_eq!(
        decide(&world.slot, Operation::Reach, 0),
        Ok(Next::Begin(Event::QueueResume))
    );
    for event in [
        Event::QueueResume,
        Event::Resume,
        Event::ResumeFailed(FailedBy::Sandbox),
    ] {
        world.apply(event);
    }
    let delay_s = 5;
    let refused = Err(Refusal::BackingOff { delay_s });
    assert_eq!(world.request(Operation::Reach), refused);
    let connect = Operation::Connect(Wake::Connect);
    assert_eq!(world.request(connect), Ok(Next::Begin(Event::QueueResume)));
    world.apply(Event::Resume);
    world.apply(Event::Resumed);
    assert_eq!(world.slot.backoff, Backoff::default());
}

#[test]
fn refusals_name_the_state() {
    let pause = Operation::Pause(PauseMode::Memory);
    let resume = Operation::Connect(Wake::Resume { auto_pause: None });
    let cold = Operation::Connect(Wake::ConnectColdBoot);
    let resume_cold = Operation::Connect(Wake::ResumeColdBoot { auto_pause: None });
    let running = World::running(ENDS).slot;
    for resume in [resume, resume_cold] {
        assert_eq!(decide(&running, resume, 0), Err(Refusal::AlreadyRunning));
    }
    assert_eq!(decide(&running, cold, 0), Ok(Next::Grant));
    for mode in [PauseMode::Memory, PauseMode::FilesystemOnly] {
        let paused = paused(mode, ENDS);
        assert_eq!(decide(&paused, pause, 0), Err(Refusal::AlreadyPaused));
        for operation in [Operation::Fork, Operation::MakeTemplate] {
            assert_eq!(decide(&paused, operation, 0), Err(Refusal::NotRunning));
        }
        let moved = decide(&paused, Operation::SetTimeout, 0);
        assert_eq!(moved, Err(Refusal::NotRunning));
    }
    let memory = paused(PauseMode::Memory, ENDS);
    let disk = paused(PauseMode::FilesystemOnly, ENDS);
    for wake in [cold, resume_cold] {
        assert_eq!(decide(&memory, wake, 0), Err(Refusal::ColdBoot));
        let resumed = decide(&disk, wake, 0);
        assert_eq!(resumed, Ok(Next::Begin(Event::QueueResume)));
    }
    let snapshot = decide(&disk, Operation::Snapshot, 0);
    assert_eq!(snapshot, Err(Refusal::NoMemory));
    let (ending, _) = transition(running, Event::Kill, 0).unwrap();
    for operation in [Operation::Kill, cold, Operation::Reach, pause] {
        assert_eq!(decide(&ending, operation, 0), Err(Refusal::NotFound));
    }
}

#[test]
fn a_pause_waits_for_the_write_of_the_record_and_a_kill_does_not() {
    let mut world = World::running(PAUSES);
    world.apply(Event::WriteBegun);
    let pause = Operation::Pause(PauseMode::Memory);
    assert_eq!(world.request(pause), Ok(Next::Wait));
    assert_eq!(world.request(Operation::SetPolicy), Ok(Next::Wait));
    assert_eq!(world.slot.due(), None);
    world.request(Operation::Kill).unwrap();
    world.apply(Event::VmExited);
    assert!(!world.slot.cleaning);
    world.apply(Event::WriteDone);
    assert!(world.slot.cleaning);
}
