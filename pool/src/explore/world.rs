//! The environment of the pool's decisions: processes, directories, records, jobs, and responses to callers.

mod properties;
mod settle;
mod steps;

use crate::{
    lifetime::{Lifetime, UnixMs},
    record::Kept,
    slot::{Event, FailedBy, Operation, Slot, Stage, Wake},
    state::PauseMode,
};

/// Limit on paused sandboxes.
const MAX_SAVED: usize = 2;
/// Places for starts.
const PLACES: u32 = 2;
const NOW: UnixMs = 0;

/// The size of the pool, and limits on external events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Bounds {
    /// Configured limit on slots that take memory.
    pub(super) max: u32,
    /// Number of warm slots to keep.
    pub(super) warm: u32,
    pub(super) creates: u8,
    pub(super) requests: u8,
    /// Jobs that fail and VMs that exit on their own.
    pub(super) failures: u8,
    pub(super) crashes: u8,
    /// Whether the server may be stopped in a way that keeps sandboxes for the next one.
    pub(super) closes: bool,
}

/// The last response or event that a caller has received about its sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Told {
    /// No caller has the id.
    Nothing,
    /// It exists: the create succeeded, or a new server lists it.
    Exists,
    /// Its end has begun. After a crash it may or may not exist.
    Ending,
    /// It has ended.
    Ended,
}

/// The files of a slot on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Disk {
    dir: bool,
    record: Option<Kept>,
    /// The files of a pause.
    files: bool,
}

/// A slot, and its environment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Place {
    /// The server's state of the slot. `None` if no server has it.
    slot: Option<Slot>,
    /// The job under way, and its number of completed steps.
    job: Option<(Job, u8)>,
    /// The process of the VM exists.
    vm: bool,
    /// The server has requested that the VM be killed.
    doomed: bool,
    disk: Disk,
    /// Whether the next server has decided to remove it.
    leftover: bool,
    told: Told,
    /// Whether a create waits for this slot.
    serves_create: bool,
    leases: u8,
    /// A request that waits for the change under way.
    waiting: Option<Request>,
}

/// Work of `pool::work`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Job {
    Fill,
    Start,
    Lease,
    Pause(PauseMode),
    Resume,
    Snapshot,
    SnapshotPaused,
    Adopt,
    AdoptPaused,
    Clean,
}

impl Job {
    /// The job that begins when a slot gets into this state, if any.
    fn of(slot: &Slot) -> Option<Self> {
        match slot.stage {
            _ if slot.cleaning => Some(Self::Clean),
            _ if !slot.job => None,
            Stage::Filling => Some(Self::Fill),
            Stage::Starting if slot.vm => Some(Self::Lease),
            Stage::Starting => Some(Self::Start),
            Stage::Pausing(mode) => Some(Self::Pause(mode)),
            Stage::Resuming(_) => Some(Self::Resume),
            Stage::Snapshotting => Some(Self::Snapshot),
            Stage::SnapshottingPaused(_) => Some(Self::SnapshotPaused),
            Stage::Adopting => Some(Self::Adopt),
            Stage::AdoptingPaused(_) => Some(Self::AdoptPaused),
            _ => None,
        }
    }

    /// Number of steps that change the environment and report nothing.
    fn steps(self) -> u8 {
        match self {
            Self::Start => 3,
            Self::Fill | Self::Pause(_) | Self::Resume | Self::Clean => 2,
            Self::Lease | Self::AdoptPaused => 1,
            Self::Snapshot | Self::SnapshotPaused | Self::Adopt => 0,
        }
    }

    /// Whether the job works on a VM that exists before it.
    fn needs_vm(self) -> bool {
        matches!(
            self,
            Self::Lease | Self::Pause(_) | Self::Snapshot | Self::Adopt
        )
    }

    /// The report of its success.
    fn done(self) -> Event {
        match self {
            Self::Fill => Event::Filled,
            Self::Start => Event::Started,
            Self::Lease => Event::Leased,
            Self::Pause(_) => Event::Saved,
            Self::Resume => Event::Resumed,
            Self::Snapshot | Self::SnapshotPaused => Event::SnapshotDone,
            Self::Adopt | Self::AdoptPaused => Event::Adopted,
            Self::Clean => Event::Cleaned,
        }
    }

    /// The reports of its failure. The last one is sent for a VM that does not respond.
    fn failures(self) -> &'static [Event] {
        match self {
            Self::Fill | Self::Start | Self::Lease | Self::Snapshot | Self::Adopt => {
                &[Event::Failed]
            }
            Self::Pause(_) => &[Event::PauseFailed, Event::Failed],
            Self::Resume => &[
                Event::ResumeFailed(FailedBy::Host),
                Event::ResumeFailed(FailedBy::Sandbox),
            ],
            Self::SnapshotPaused | Self::AdoptPaused | Self::Clean => &[],
        }
    }
}

/// A request of a client about its sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Request {
    Connect,
    Resume,
    SetTimeout,
    Pause(PauseMode),
    Snapshot,
    Kill,
    Reach,
}

impl Request {
    const ALL: [Self; 8] = [
        Self::Connect,
        Self::Resume,
        Self::SetTimeout,
        Self::Pause(PauseMode::Memory),
        Self::Pause(PauseMode::FilesystemOnly),
        Self::Snapshot,
        Self::Kill,
        Self::Reach,
    ];

    fn operation(self) -> Operation {
        match self {
            Self::Connect => Operation::Connect(Wake::Connect),
            Self::Resume => Operation::Connect(Wake::Resume { auto_pause: None }),
            Self::SetTimeout => Operation::SetTimeout,
            Self::Pause(mode) => Operation::Pause(mode),
            Self::Snapshot => Operation::Snapshot,
            Self::Kill => Operation::Kill,
            Self::Reach => Operation::Reach,
        }
    }
}

/// An event. Numbers identify slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Create,
    Request(usize, Request),
    /// The deadline expires.
    Deadline(usize),
    /// The job performs its next step.
    Work(usize),
    /// The job sends this report.
    Report(usize, Event),
    /// The VM exits, because it was killed or on its own.
    Exit(usize),
    /// The exit is reported.
    Exited(usize),
    /// A leftover of the previous server is removed.
    Sweep(usize),
    /// The server stops: creates and resumes are refused, and slots without an owner end.
    Close,
    Crash,
    Recover,
}

/// The state of the model.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct World {
    up: bool,
    places: Vec<Place>,
    /// Creates in the queue.
    queued: u8,
    refilling: bool,
    closing: bool,
    lifetime: Lifetime,
    bounds: Bounds,
}

/// The description of a violated property.
type Violation = String;

fn violated<T>(property: &str) -> Result<T, Violation> {
    Err(property.to_owned())
}

impl Place {
    fn new(stage: Stage, lifetime: Lifetime) -> Self {
        let mut slot = Slot::new(stage);
        slot.lifetime = lifetime;
        Self {
            slot: Some(slot),
            job: Job::of(&slot).map(|job| (job, 0)),
            vm: false,
            doomed: false,
            disk: Disk {
                dir: false,
                record: None,
                files: false,
            },
            leftover: false,
            told: Told::Nothing,
            serves_create: false,
            leases: 0,
            waiting: None,
        }
    }

    fn stage(&self) -> Option<Stage> {
        self.slot.map(|slot| slot.stage)
    }

    fn is_empty(&self) -> bool {
        self.slot.is_none() && !self.vm && !self.disk.dir
    }

    /// Whether the job has a next step. Writes to the disk that have begun do not need the VM.
    fn next_work(&self) -> bool {
        let Some((job, step)) = self.job else {
            return false;
        };
        step < job.steps() && (self.vm || step > 0 || !job.needs_vm())
    }

    /// Performs the next step of the job, in the order of `pool::work`.
    fn work(&mut self) {
        let Some((job, step)) = &mut self.job else {
            return;
        };
        let disk = &mut self.disk;
        match (*job, *step) {
            (Job::Fill | Job::Start, 0) => {
                disk.dir = true;
                self.vm = true;
            }
            (Job::Fill | Job::Start, 1) => disk.record = Some(Kept::Nobody),
            (Job::Start | Job::Lease, _) => disk.record = Some(Kept::Running),
            (Job::Pause(_), 0) => disk.files = true,
            (Job::Pause(mode), _) => disk.record = Some(Kept::Paused(mode)),
            (Job::Resume, 0) => self.vm = true,
            (Job::Resume, _) => disk.record = Some(Kept::Running),
            // The leftover process is ended.
            (Job::AdoptPaused, _) => self.vm = false,
            (Job::Clean, 0) => disk.record = None,
            (Job::Clean, _) => {
                disk.dir = false;
                disk.files = false;
            }
            _ => {}
        }
        *step += 1;
    }

    /// The report of the job's success, if it is possible now.
    fn success(&self) -> Option<Event> {
        let (job, step) = self.job?;
        let has_vm = self.vm || job.steps() > 0 || !job.needs_vm();
        (step == job.steps() && has_vm).then(|| job.done())
    }

    /// Reports of failure that are possible now. The last step of a start makes the record name an owner, and is the
    /// last step that can fail.
    fn failures(&self) -> Vec<Event> {
        let Some((job, step)) = self.job else {
            return Vec::new();
        };
        let is_made = matches!(job, Job::Start | Job::Resume) && step == job.steps();
        let may_be = |event: &&Event| !is_made && (self.vm || **event != Event::PauseFailed);
        job.failures().iter().filter(may_be).copied().collect()
    }

    /// The report of a job that can neither continue nor succeed.
    fn must_fail(&self) -> Option<Event> {
        let is_void = self.success().is_none() && !self.next_work();
        self.failures().last().copied().filter(|_| is_void)
    }
}

impl World {
    pub(super) fn new(lifetime: Lifetime, bounds: Bounds) -> Self {
        let mut world = Self {
            up: true,
            places: Vec::new(),
            queued: 0,
            refilling: false,
            closing: false,
            lifetime,
            bounds,
        };
        world.settle().expect("an empty pool");
        world
    }
}
