//! The steps of a build.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use model::{HypercallPath, RestoreSpec, VmSpec, WorkingSetPrefault, template_file};
use vmm_control::{VmProcess, fresh_identity};

use crate::{
    BuildError, Quiet, RECIPE_NAME, Recipe, Step, Work,
    agent::{Guest, Started},
    error::{Cause, last_lines},
    quiet,
    recipe::FILES,
};

/// Interval between two attempts of the ready command.
const READY_STEP: Duration = Duration::from_millis(100);
/// Run before the snapshot, because every clone would write back its dirty pages.
const SYNC: [&str; 1] = ["/bin/sync"];

/// Time limits of a build.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// For each response of the VMM and the agent. A boot takes about a second on an idle host.
    pub answer: Duration,
    /// For each command and request of the recipe, and for the wait until the guest is ready.
    pub work: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            answer: Duration::from_secs(60),
            work: Duration::from_secs(600),
        }
    }
}

impl Limits {
    /// Limits for a build that is delayed by other work on the host.
    #[must_use]
    pub fn for_background(self) -> Self {
        Self {
            answer: self.answer * 10,
            work: self.work * 10,
        }
    }
}

/// Builds templates with one VMM.
#[derive(Debug)]
pub struct Builder<'a> {
    /// The program `cube-vmm`.
    pub vmm: &'a Path,
    /// A directory for the VMs' sockets. Its path must be short, because the path of a Unix socket is limited to 107
    /// bytes.
    pub run: &'a Path,
    /// A file that receives the VMMs' standard error. The guests' consoles are written next to it, with the extensions
    /// `boot.console` and `restore.console`.
    pub log: &'a Path,
    pub limits: Limits,
}

/// A finished build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    pub quiet: Quiet,
    /// Duration of the steps before the wait for an idle guest.
    pub prepared_in: Duration,
}

/// Called with the process id of each VMM before it has a VM. An error ends the build.
type OnVmm<'a> = &'a dyn Fn(u32) -> io::Result<()>;

/// A step that failed.
type Failed = (Step, Cause);

fn at<E: Into<Cause>>(step: Step) -> impl Fn(E) -> Failed {
    move |error| (step, error.into())
}

impl Builder<'_> {
    /// Builds the template in the directory `out`, which must not exist. Everything below `files` is copied to the same
    /// paths in the guest. These files and the recipe become part of the template. `on_vmm` is called with the process
    /// id of each VMM before it has a VM. An error ends the build.
    ///
    /// # Errors
    /// Returns [`BuildError`]. `out` is then incomplete or does not exist.
    pub fn build(
        &self,
        recipe: &Recipe,
        files: Option<&Path>,
        out: &Path,
        on_vmm: OnVmm<'_>,
    ) -> Result<Report, BuildError> {
        let [boot, restore] =
            ["boot.console", "restore.console"].map(|name| self.log.with_extension(name));
        let fail = |console: &Path| {
            let console = last_lines(console);
            move |(step, cause)| BuildError {
                step,
                cause,
                console,
            }
        };
        let report = self.snapshot(recipe, files, &boot, out, on_vmm);
        let report = report.map_err(|failed| fail(&boot)(failed))?;
        let recorded = self.record_working_set(recipe, &restore, out, on_vmm);
        recorded.map_err(|failed| fail(&restore)(failed))?;
        let written = record(recipe, files, out).map_err(at(Step::Record));
        written.map_err(|failed| fail(&restore)(failed))?;
        Ok(report)
    }

    /// Boots and prepares a guest, and writes its snapshot.
    fn snapshot(
        &self,
        recipe: &Recipe,
        files: Option<&Path>,
        console: &Path,
        out: &Path,
        on_vmm: OnVmm<'_>,
    ) -> Result<Report, Failed> {
        let begun = Instant::now();
        let vsock = self.run.join("boot.sock");
        let mut vm = self.spawn(on_vmm).map_err(|cause| (Step::Boot, cause))?;
        let spec = VmSpec {
            memory: recipe.memory,
            vcpus: recipe.vcpus,
            guest: recipe.guest(),
            cmdline: String::new(),
            hypercalls: HypercallPath::default(),
            vsock: vsock.clone(),
            console: Some(console.to_owned()),
            layer_limit: None,
        };
        vm.control.boot(spec, None).map_err(at(Step::Boot))?;
        let guest = self.identify(&mut vm, &vsock)?;
        guest.set_network(false).map_err(at(Step::Network))?;
        if let Some(files) = files {
            guest.copy(files, "").map_err(at(Step::Files))?;
        }
        guest.all(&recipe.setup).map_err(at(Step::Setup))?;
        start(&mut vm, guest, recipe)?;
        guest.all(&recipe.warm_up).map_err(at(Step::WarmUp))?;
        guest.work(&Work::run(&SYNC)).map_err(at(Step::Sync))?;
        let prepared_in = begun.elapsed();
        let quiet = quiet::wait(&mut vm, guest).map_err(at(Step::Quiet))?;
        vm.control.snapshot(out).map_err(at(Step::Snapshot))?;
        vm.control.shutdown().map_err(at(Step::Snapshot))?;
        Ok(Report { quiet, prepared_in })
    }

    /// Restores the template, performs the first work of a clone, and records in the template which pages the clone has
    /// written.
    fn record_working_set(
        &self,
        recipe: &Recipe,
        console: &Path,
        template: &Path,
        on_vmm: OnVmm<'_>,
    ) -> Result<(), Failed> {
        let vsock = self.run.join("restore.sock");
        let mut vm = self.spawn(on_vmm).map_err(|cause| (Step::Restore, cause))?;
        let spec = RestoreSpec {
            template: template.to_owned(),
            base: None,
            root: None,
            vsock: vsock.clone(),
            console: Some(console.to_owned()),
            layer_limit: None,
            prefault: WorkingSetPrefault::Off,
        };
        vm.control.restore(spec, None).map_err(at(Step::Restore))?;
        vm.control.resume().map_err(at(Step::Restore))?;
        let guest = self.identify(&mut vm, &vsock)?;
        guest.all(&recipe.first).map_err(at(Step::FirstWork))?;
        let path = template.join(template_file::WORKING_SET);
        let recorded = vm.control.record_working_set(&path);
        recorded.map_err(at(Step::WorkingSet))?;
        vm.control.shutdown().map_err(at(Step::WorkingSet))
    }

    fn spawn(&self, on_vmm: OnVmm<'_>) -> Result<VmProcess, Cause> {
        let log = File::options().append(true).create(true).open(self.log);
        let log = log.map_err(Cause::file(self.log))?;
        let vm = VmProcess::spawn(self.vmm, Some(log), Some(self.limits.answer))?;
        on_vmm(vm.pid()).map_err(Cause::Stopped)?;
        Ok(vm)
    }

    /// Gives the guest an identity, and switches its network card on.
    fn identify<'a>(&self, vm: &mut VmProcess, vsock: &'a Path) -> Result<Guest<'a>, Failed> {
        let identity = fresh_identity("template").map_err(Cause::file(Path::new("/dev/urandom")));
        let identity = identity.map_err(at(Step::Identity))?;
        let identified = vm.control.identity(identity, self.limits.answer);
        identified.map_err(at(Step::Identity))?;
        let limits = self.limits;
        let guest = Guest { vsock, limits };
        guest.set_network(true).map_err(at(Step::Network))?;
        Ok(guest)
    }
}

/// Runs the start command, and waits until the guest is ready.
fn start(vm: &mut VmProcess, guest: Guest<'_>, recipe: &Recipe) -> Result<(), Failed> {
    let started = match recipe.start.as_slice() {
        [] => None,
        argv => Some(guest.start(argv).map_err(at(Step::Start))?),
    };
    let check = || started.as_ref().map_or(Ok(()), Started::check);
    if let Some(ready) = &recipe.ready {
        let begun = Instant::now();
        while let Err(last) = guest.work(ready) {
            check().map_err(at(Step::Start))?;
            // Fails if the VM has ended.
            vm.control.stats().map_err(at(Step::Ready))?;
            let limit = guest.limits.work;
            if begun.elapsed() >= limit {
                let last = Box::new(last);
                return Err((Step::Ready, Cause::NotReady { limit, last }));
            }
            thread::sleep(READY_STEP);
        }
    }
    check().map_err(at(Step::Start))
}

/// Writes the recipe and the copied files into the template.
fn record(recipe: &Recipe, files: Option<&Path>, template: &Path) -> Result<(), Cause> {
    let path = template.join(RECIPE_NAME);
    let written = serde_json::to_vec_pretty(recipe)
        .map_err(io::Error::other)
        .and_then(|text| fs::write(&path, text));
    written.map_err(Cause::file(&path))?;
    match files {
        Some(files) => copy_tree(files, &template.join(FILES)).map_err(Cause::file(files)),
        None => Ok(()),
    }
}

fn copy_tree(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir(to)?;
    for entry in fs::read_dir(from)? {
        let path = entry?.path();
        let target = to.join(path.file_name().unwrap_or_default());
        if path.is_dir() {
            copy_tree(&path, &target)?;
        } else {
            fs::copy(&path, &target)?;
        }
    }
    Ok(())
}

/// The files of the template in `dir` that were copied into the guest, for [`Builder::build`].
#[must_use]
pub fn files_of(dir: &Path) -> Option<PathBuf> {
    Some(dir.join(FILES)).filter(|files| files.is_dir())
}
