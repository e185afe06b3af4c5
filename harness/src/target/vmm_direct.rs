//! The target `vmm-direct`: one `cube-vmm` process for each clone, driven through its control socket. Commands go
//! to the guest agent through the vsock socket of the clone.

use std::{
    fs::File,
    io::{self, Read},
    os::fd::AsFd,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use model::chain;
use model::{
    EntropySeed, Identity, RestoreSpec, StartPhase, Timeline, WorkingSetPrefault, template_file,
};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use vmm_control::{ControlError, VmProcess, frame::FrameError, template::LoadedTemplate};

use super::{CloneId, Output, PageCache, Sandbox, Target, group::Groups};
use testbed::{leftovers::RunDir, world::PlainNetwork};

use crate::{
    account, clock,
    event::{Failure, FailureCause},
    guest,
    scenario::{ExecSpec, TargetSpec},
};

/// Source of identities and entropy seeds.
pub const RANDOM: &str = "/dev/urandom";
// File names in the directory of a clone.
const VSOCK: &str = "vsock.sock";
const CONSOLE: &str = "console.log";
/// File of the VMM's standard error. `testbed::leftovers` finds VMM processes by it.
pub const STDERR: &str = "vmm.stderr";

/// Starts clones of one template.
#[derive(Debug)]
pub struct VmmDirect {
    program: PathBuf,
    template: PathBuf,
    loaded: Option<Arc<LoadedTemplate>>,
    cold: AtomicBool,
    prefault: WorkingSetPrefault,
    timeout: Duration,
    run_dir: Arc<RunDir>,
    random: File,
    /// Network and cgroups of the clones; `None` for clones without a network.
    network: Option<(PlainNetwork, Groups)>,
}

impl VmmDirect {
    /// `program` is `cube-vmm`, `template` is the directory of a template, and `loaded` is the same template copied
    /// into huge pages, or `None` if that was not possible.
    ///
    /// # Errors
    /// Returns an error if /dev/urandom cannot be opened.
    pub fn new(
        program: PathBuf,
        template: PathBuf,
        loaded: Option<LoadedTemplate>,
        spec: &TargetSpec,
        run_dir: Arc<RunDir>,
    ) -> io::Result<Self> {
        Ok(Self {
            program,
            template,
            loaded: loaded.map(Arc::new),
            cold: AtomicBool::new(false),
            prefault: spec.prefault,
            timeout: spec.start_timeout,
            run_dir,
            random: File::open(RANDOM)?,
            network: None,
        })
    }

    /// Connects clones to a network and moves them into `groups`. Only one clone may run at a time, because all clones
    /// have the same address.
    #[must_use]
    pub(crate) fn with_network(self, network: PlainNetwork, groups: Groups) -> Self {
        Self {
            network: Some((network, groups)),
            ..self
        }
    }

    /// A second target for the same loaded template, with another prefault setting and without a network.
    ///
    /// # Errors
    /// Returns an error if the process has no free file descriptor.
    pub fn with_prefault(&self, prefault: WorkingSetPrefault) -> io::Result<Self> {
        Ok(Self {
            program: self.program.clone(),
            template: self.template.clone(),
            loaded: self.loaded.clone(),
            cold: AtomicBool::new(false),
            prefault,
            timeout: self.timeout,
            run_dir: Arc::clone(&self.run_dir),
            random: self.random.try_clone()?,
            network: None,
        })
    }

    /// The directory to restore from: the template on disk for cold starts or if the template is not loaded, otherwise
    /// the loaded template.
    fn source(&self) -> PathBuf {
        match &self.loaded {
            Some(loaded) if !self.cold.load(Ordering::Relaxed) => loaded.dir(),
            _ => self.template.clone(),
        }
    }

    fn identity(&self, id: CloneId) -> io::Result<Identity> {
        let mut machine = [0; 16];
        let mut entropy = [0; 32];
        (&self.random).read_exact(&mut machine)?;
        (&self.random).read_exact(&mut entropy)?;
        Ok(Identity {
            hostname: format!("clone-{}-{}", id.round, id.arrival),
            machine_id: machine.iter().map(|b| format!("{b:02x}")).collect(),
            entropy: EntropySeed::new(entropy),
        })
    }

    fn start(
        &self,
        id: CloneId,
        dir: &Path,
        timeline: &mut Timeline,
    ) -> Result<VmProcess, Failure> {
        let io = |e: io::Error| Failure {
            cause: FailureCause::Spawn,
            message: format!("{}: {e}", dir.display()),
        };
        let identity = self.identity(id).map_err(io)?;
        let log = File::create_new(dir.join(STDERR)).map_err(io)?;
        let network = self.network.as_ref();
        let tap = network.map(|(network, _)| network.tap()).transpose();
        let tap = tap.map_err(|e| Failure {
            cause: FailureCause::Network,
            message: format!("cannot open the TAP of the clone: {e}"),
        })?;
        let control = |cause| move |e: ControlError| control_failure(cause, &e);
        let mut vm = VmProcess::spawn(&self.program, Some(log), Some(self.timeout))
            .map_err(control(FailureCause::Spawn))?;
        if let Some((_, groups)) = network {
            groups.take(vm.pid()).map_err(io)?;
        }
        let spec = RestoreSpec {
            template: self.source(),
            base: None,
            root: None,
            vsock: dir.join(VSOCK),
            console: Some(dir.join(CONSOLE)),
            layer_limit: None,
            prefault: self.prefault,
        };
        *timeline = vm
            .control
            .restore(spec, tap.as_ref().map(|tap| tap.as_fd()))
            .map_err(control(FailureCause::Restore))?;
        // The VMM has its own descriptor now. After this one is closed, the TAP disappears with the VMM.
        drop(tap);
        vm.control.resume().map_err(control(FailureCause::Resume))?;
        *timeline = vm
            .control
            .identity(identity, self.timeout)
            .map_err(control(FailureCause::Identity))?;
        if network.is_some() {
            guest::switch_network_on(&dir.join(VSOCK), self.timeout)?;
        }
        timeline.stamp(StartPhase::Replied, clock::monotonic_ns());
        Ok(vm)
    }
}

impl Target for VmmDirect {
    fn create(&self, id: CloneId, timeline: &mut Timeline) -> Result<Box<dyn Sandbox>, Failure> {
        let dir = self
            .run_dir
            .clone_dir(&id.to_string())
            .map_err(|e| Failure {
                cause: FailureCause::Spawn,
                message: format!("{}: {e}", self.run_dir.path().display()),
            })?;
        let dir = CloneDir(dir);
        match self.start(id, &dir.0, timeline) {
            Ok(vm) => Ok(Box::new(Clone { vm, dir })),
            Err(mut failure) => {
                failure.message.push_str(&last_line(&dir.0));
                Err(failure)
            }
        }
    }

    /// The CPU time of a VMM counts once it has ended and been waited for.
    fn cpu_ns(&self) -> Option<u64> {
        account::children_cpu_ns()
    }

    fn prepare_cache(&self, wanted: PageCache) -> io::Result<()> {
        self.cold
            .store(wanted == PageCache::Dropped, Ordering::Relaxed);
        let mut memory = File::open(self.source().join(template_file::MEMORY))?;
        match wanted {
            PageCache::Dropped => {
                let dont_need = PosixFadviseAdvice::POSIX_FADV_DONTNEED;
                posix_fadvise(memory.as_fd(), 0, 0, dont_need).map_err(io::Error::from)
            }
            PageCache::ReadAhead => io::copy(&mut memory, &mut io::sink()).map(|_| ()),
        }
    }
}

/// A clone. Fields are dropped in this order: the process first, then its files.
struct Clone {
    vm: VmProcess,
    dir: CloneDir,
}

/// The directory of one clone. Dropping it removes the directory.
struct CloneDir(PathBuf);

impl Drop for CloneDir {
    fn drop(&mut self) {
        // On failure, the directory is removed with the directory of the run.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Sandbox for Clone {
    fn exec(&mut self, command: &ExecSpec) -> Result<Output, Failure> {
        guest::exec(&self.dir.0.join(VSOCK), command).map_err(|mut failure| {
            failure.message.push_str(&last_line(&self.dir.0));
            failure
        })
    }

    fn write_file(&mut self, path: &str, bytes: &[u8]) -> Result<(), Failure> {
        guest::write_file(&self.dir.0.join(VSOCK), path, bytes)
    }

    fn set_network(&mut self, _: &serde_json::Value) -> Result<(), Failure> {
        Err(Failure {
            cause: FailureCause::Network,
            message: "vmm-direct has no network policies".to_owned(),
        })
    }

    fn pid(&self) -> Option<u32> {
        Some(self.vm.pid())
    }

    fn kill(self: Box<Self>) -> Result<(), Failure> {
        let Self { vm, dir } = *self;
        vm.kill()
            .and_then(|()| std::fs::remove_dir_all(&dir.0))
            .map_err(|e| Failure {
                cause: FailureCause::Kill,
                message: format!("{}: {e}", dir.0.display()),
            })
    }
}

/// The last line of the VMM's standard error as a suffix for messages; empty if the VMM printed nothing.
fn last_line(dir: &Path) -> String {
    let text = std::fs::read_to_string(dir.join(STDERR)).unwrap_or_default();
    match text.lines().rfind(|line| !line.trim().is_empty()) {
        Some(line) => format!(" (last line of the VMM's log: {line})"),
        None => String::new(),
    }
}

fn control_failure(cause: FailureCause, error: &ControlError) -> Failure {
    let timed_out = match error {
        ControlError::Frame(FrameError::Io(e)) => matches!(
            e.kind(),
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
        ),
        _ => false,
    };
    Failure {
        cause: if timed_out {
            FailureCause::Timeout
        } else {
            cause
        },
        message: format!("{}: {}", cause.name(), chain(error)),
    }
}
