//! The template `base`: a booted guest in which the commands that users run first have already run, so
//! that its page cache is warm and clones share it.
//!
//! ```text
//! boot → identity → warm up → sync → snapshot      one VMM
//! restore → identity → probe → record working set  another, the template's first clone
//! ```

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use api_types::envd::{ENVD_PORT, EnvdClient, ExecRequest, InitRequest};
use model::{
    Bytes, GuestPaths, HypercallPath, RestoreSpec, VmSpec, WorkingSetPrefault, template_file,
};
use vmm_control::{VmProcess, fresh_identity};

use crate::{
    guest_dir, initramfs, layer, root_image,
    stage::{Built, Recipe, Store},
    tool,
    workspace::Workspace,
};

const PLACE: &str = "templates/base";
/// As much as a sandbox of E2B has unless it asks for another size.
const MEMORY: Bytes = Bytes::mib(512);
/// A boot takes about a second; a host under load gets this long for any single answer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// A guest that has not woken up for this long is quiet.
const QUIET: Duration = Duration::from_secs(1);
/// One that never is would only make slower clones.
const QUIET_PATIENCE: Duration = Duration::from_secs(30);
/// Each warm-up runs this often: the first run reads files, the second takes the paths of a warm one.
const WARM_UP_RUNS: usize = 2;
/// Endings of the two guests' console files.
pub(crate) const BOOT: &str = "boot.console";
pub(crate) const RESTORE: &str = "restore.console";
const PROBE: [&str; 1] = ["/usr/local/bin/probe"];
/// What users run first.
const WARM_UP: [&[&str]; 6] = [
    &PROBE,
    &["/bin/bash", "-lc", "true"],
    &["/usr/bin/python3", "-c", "print(1)"],
    &["/usr/bin/node", "-e", "0"],
    &["/usr/bin/git", "--version"],
    &["/usr/bin/curl", "--version"],
];

/// Makes the template unless it is fresh.
pub(crate) fn build(store: &Store, workspace: &Workspace, vmm: &Path) -> Result<Built> {
    let paths = guest_paths(&workspace.guest());
    let recipe = Recipe::new("template")
        .text("memory", &MEMORY.to_string())
        .text("warm-up", &format!("{WARM_UP:?} {WARM_UP_RUNS} times"))
        .text("root image at", &paths.root.display().to_string())
        .path("manifest", &workspace.guest().join(guest_dir::MANIFEST))?
        .path("vmm", vmm)?;
    store.build(&recipe, PLACE, |out, log| {
        let run = tempfile::Builder::new()
            .prefix("cube-template-")
            .tempdir()?;
        let maker = Maker {
            vmm,
            run: run.path(),
            log,
        };
        // The VMM makes the directory itself, so that it never writes into one that stands.
        fs::remove_dir(out)?;
        maker
            .snapshot(paths, MEMORY, out, warm_up)
            .with_context(|| maker.failed("cannot make the template", BOOT))?;
        maker
            .record_working_set(out, probe)
            .with_context(|| maker.failed("the template cannot be restored", RESTORE))
    })
}

pub(crate) fn guest_paths(guest: &Path) -> GuestPaths {
    GuestPaths {
        kernel: guest.join("vmlinux"),
        initrd: guest.join(initramfs::FILE),
        root: guest.join(root_image::FILE),
        layer: guest.join(layer::FILE),
    }
}

/// What both VMs of a template have around them.
#[derive(Debug)]
pub(crate) struct Maker<'a> {
    pub(crate) vmm: &'a Path,
    /// Sockets and consoles; short-lived and with a short name, which unix sockets need.
    pub(crate) run: &'a Path,
    pub(crate) log: &'a Path,
}

impl Maker<'_> {
    /// Boots a guest, has it warmed up through its agent's socket, and takes the snapshot.
    pub(crate) fn snapshot(
        &self,
        guest: GuestPaths,
        memory: Bytes,
        dir: &Path,
        warm_up: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<()> {
        let vsock = self.run.join("boot.sock");
        let mut vm = self.spawn()?;
        let spec = VmSpec {
            memory,
            vcpus: 1,
            guest,
            cmdline: String::new(),
            hypercalls: HypercallPath::default(),
            vsock: vsock.clone(),
            console: Some(self.console(BOOT)),
            layer_limit: None,
        };
        vm.control.boot(spec, None).context("cannot boot")?;
        vm.control.identity(fresh_identity("template")?, PATIENCE)?;
        set_network(&vsock, true)?;
        set_network(&vsock, false)?;
        warm_up(&vsock)?;
        until_quiet(&mut vm)?;
        vm.control.snapshot(dir).context("cannot snapshot")?;
        Ok(vm.control.shutdown()?)
    }

    /// Restores the template once and notes which pages its first work makes its own.
    pub(crate) fn record_working_set(
        &self,
        template: &Path,
        work: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<()> {
        let vsock = self.run.join("restore.sock");
        let mut vm = self.spawn()?;
        let spec = RestoreSpec {
            template: template.to_owned(),
            base: None,
            vsock: vsock.clone(),
            console: Some(self.console(RESTORE)),
            layer_limit: None,
            prefault: WorkingSetPrefault::Off,
        };
        vm.control.restore(spec, None)?;
        vm.control.resume()?;
        vm.control.identity(fresh_identity("template")?, PATIENCE)?;
        set_network(&vsock, true)?;
        work(&vsock)?;
        let path = template.join(template_file::WORKING_SET);
        vm.control.record_working_set(&path)?;
        Ok(vm.control.shutdown()?)
    }

    fn console(&self, which: &str) -> PathBuf {
        self.log.with_extension(which)
    }

    /// What failed, and what the guest said last.
    pub(crate) fn failed(&self, what: &str, console: &str) -> String {
        let console = self.console(console);
        let end = tool::last_lines(&console);
        format!("{what}; the end of {}:\n{end}\n", console.display())
    }

    fn spawn(&self) -> Result<VmProcess> {
        let log = File::options().append(true).open(self.log)?;
        Ok(VmProcess::spawn(self.vmm, Some(log), Some(PATIENCE))?)
    }
}

/// Waits until the guest's kernel has done what the last command left to it: what is pending in a snapshot is
/// done again by each of its clones, in their first milliseconds.
fn until_quiet(vm: &mut VmProcess) -> Result<()> {
    let started = Instant::now();
    let mut before = None;
    while started.elapsed() < QUIET_PATIENCE {
        let woken = vm.control.stats()?.exits.get("idle").copied();
        if before.replace(woken) == Some(woken) {
            break;
        }
        std::thread::sleep(QUIET);
    }
    Ok(())
}

pub(crate) fn connect(vsock: &Path) -> Result<EnvdClient> {
    EnvdClient::connect(vsock, ENVD_PORT, PATIENCE).context("cannot reach the agent")
}

fn probe(vsock: &Path) -> Result<()> {
    run(&mut connect(vsock)?, &PROBE)
}

/// As a sandbox with a network has it set up; a template's own guests have no TAP.
fn set_network(vsock: &Path, on: bool) -> Result<()> {
    let request = InitRequest {
        network: Some(on),
        ..InitRequest::default()
    };
    connect(vsock)?
        .init(&request)
        .context("the guest's network card")
}

fn warm_up(vsock: &Path) -> Result<()> {
    let mut agent = connect(vsock)?;
    for command in WARM_UP {
        for _ in 0..WARM_UP_RUNS {
            run(&mut agent, command)?;
        }
    }
    // Nothing of the layer is left to write when the clones wake up.
    run(&mut agent, &["/bin/sync"])
}

/// Runs a command as the sandbox's default user.
pub(crate) fn run(agent: &mut EnvdClient, command: &[&str]) -> Result<()> {
    run_as(agent, None, command, PATIENCE)
}

pub(crate) fn run_as_root(
    agent: &mut EnvdClient,
    command: &[&str],
    patience: Duration,
) -> Result<()> {
    run_as(agent, Some("root"), command, patience)
}

fn run_as(
    agent: &mut EnvdClient,
    user: Option<&str>,
    command: &[&str],
    patience: Duration,
) -> Result<()> {
    let (program, arguments) = command.split_first().context("an empty command")?;
    let request = ExecRequest {
        user: user.map(str::to_owned),
        ..ExecRequest::new(*program, arguments)
    };
    let output = agent
        .exec(&request, patience)
        .with_context(|| format!("{command:?} did not run in the guest"))?;
    ensure!(
        output.exited && output.exit_code == 0,
        "{command:?} ended with {} in the guest: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
