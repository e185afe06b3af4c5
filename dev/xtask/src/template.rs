//! The template `base`: a snapshot of a booted guest that has already run the commands that users run first, so that
//! clones share a warm page cache.
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
    Bytes, GuestPaths, HypercallPath, MadeBy, RestoreSpec, VmSpec, WorkingSetPrefault,
    template_file,
};
use vmm_control::{VmProcess, fresh_identity};

use crate::{
    guest_dir, initramfs, layer, root_image,
    stage::{self, Built, Recipe, Store},
    tool,
    workspace::Workspace,
};

const PLACE: &str = "templates/base";
/// Guest memory: E2B's default for a sandbox.
const MEMORY: Bytes = Bytes::mib(512);
/// Time limit for each answer of the VMM or the agent. A boot takes about a second on an idle host.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// A guest whose vCPU has not woken up for this long is quiet.
const QUIET: Duration = Duration::from_secs(1);
/// The snapshot is taken after this time even if the guest is not quiet: clones are then only slower.
const QUIET_TIMEOUT: Duration = Duration::from_secs(30);
/// Runs of each warm-up command: the first fills the page cache, the second touches the memory that a warm run needs.
const WARM_UP_RUNS: usize = 2;
/// Extensions of the two guests' console files.
pub(crate) const BOOT: &str = "boot.console";
pub(crate) const RESTORE: &str = "restore.console";
const PROBE: [&str; 1] = ["/usr/local/bin/probe"];
/// The commands that users run first.
pub(crate) const WARM_UP: [&[&str]; 6] = [
    &PROBE,
    &["/bin/bash", "-lc", "true"],
    &["/usr/bin/python3", "-c", "print(1)"],
    &["/usr/bin/node", "-e", "0"],
    &["/usr/bin/git", "--version"],
    &["/usr/bin/curl", "--version"],
];

/// Builds the template unless it is up to date.
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
        let builder = TemplateBuilder {
            vmm,
            run: run.path(),
            log,
        };
        // The VMM refuses to write a snapshot to an existing directory, so that it never overwrites one.
        fs::remove_dir(out)?;
        builder
            .snapshot(paths, MEMORY, out, warm_up)
            .with_context(|| builder.failed("cannot build the template", BOOT))?;
        builder
            .record_working_set(out, probe)
            .with_context(|| builder.failed("cannot restore the template", RESTORE))?;
        add_maker(out, vmm)
    })
}

/// Adds the VMM that made the template, and its name: after an upgrade, the pool starts the template's clones with it.
pub(crate) fn add_maker(template: &Path, vmm: &Path) -> Result<()> {
    let made_by = MadeBy {
        vmm_sha256: stage::file_sum(vmm)?,
    };
    let text = serde_json::to_string_pretty(&made_by)?;
    fs::write(template.join(template_file::MADE_BY), text)?;
    let carried = template.join("cube-vmm");
    fs::hard_link(vmm, &carried)
        .or_else(|_| fs::copy(vmm, &carried).map(drop))
        .with_context(|| format!("cannot copy {}", vmm.display()))
}

pub(crate) fn guest_paths(guest: &Path) -> GuestPaths {
    GuestPaths {
        kernel: guest.join("vmlinux"),
        initrd: guest.join(initramfs::FILE),
        root: guest.join(root_image::FILE),
        layer: guest.join(layer::FILE),
    }
}

/// Starts the two VMs that build a template: one that is snapshotted, one that records the working set.
#[derive(Debug)]
pub(crate) struct TemplateBuilder<'a> {
    pub(crate) vmm: &'a Path,
    /// Directory of the VMs' sockets. Its path is short because the path of a Unix socket is limited to 107 bytes.
    pub(crate) run: &'a Path,
    pub(crate) log: &'a Path,
}

impl TemplateBuilder<'_> {
    /// Boots a guest, calls `warm_up` with the path of its vsock socket, and writes the snapshot to `dir`.
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
        vm.control
            .identity(fresh_identity("template")?, ANSWER_TIMEOUT)?;
        set_network(&vsock, true)?;
        set_network(&vsock, false)?;
        warm_up(&vsock)?;
        until_quiet(&mut vm)?;
        vm.control.snapshot(dir).context("cannot snapshot")?;
        Ok(vm.control.shutdown()?)
    }

    /// Restores the template, calls `work` with the path of its vsock socket, and records in the template which pages
    /// the clone has written.
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
            root: None,
            vsock: vsock.clone(),
            console: Some(self.console(RESTORE)),
            layer_limit: None,
            prefault: WorkingSetPrefault::Off,
        };
        vm.control.restore(spec, None)?;
        vm.control.resume()?;
        vm.control
            .identity(fresh_identity("template")?, ANSWER_TIMEOUT)?;
        set_network(&vsock, true)?;
        work(&vsock)?;
        let path = template.join(template_file::WORKING_SET);
        vm.control.record_working_set(&path)?;
        Ok(vm.control.shutdown()?)
    }

    fn console(&self, which: &str) -> PathBuf {
        self.log.with_extension(which)
    }

    /// An error message with the last lines of the guest's console.
    pub(crate) fn failed(&self, what: &str, console: &str) -> String {
        let console = self.console(console);
        let end = tool::last_lines(&console);
        format!("{what}; last lines of {}:\n{end}\n", console.display())
    }

    fn spawn(&self) -> Result<VmProcess> {
        let log = File::options().append(true).open(self.log)?;
        Ok(VmProcess::spawn(self.vmm, Some(log), Some(ANSWER_TIMEOUT))?)
    }
}

/// Waits until the guest's kernel has finished the background work of the last command, or until [`QUIET_TIMEOUT`].
/// Every clone would repeat work that is pending in the snapshot, and be slower in its first milliseconds.
fn until_quiet(vm: &mut VmProcess) -> Result<()> {
    let started = Instant::now();
    let mut before = None;
    while started.elapsed() < QUIET_TIMEOUT {
        let woken = vm.control.stats()?.exits.get("idle").copied();
        if before.replace(woken) == Some(woken) {
            break;
        }
        std::thread::sleep(QUIET);
    }
    Ok(())
}

pub(crate) fn connect(vsock: &Path) -> Result<EnvdClient> {
    EnvdClient::connect(vsock, ENVD_PORT, ANSWER_TIMEOUT).context("cannot reach the guest agent")
}

fn probe(vsock: &Path) -> Result<()> {
    run(&mut connect(vsock)?, &PROBE)
}

/// Switches the guest's network card on or off. The guests of a template have no TAP; switching the card warms up the
/// code that a sandbox with a network runs.
fn set_network(vsock: &Path, on: bool) -> Result<()> {
    let request = InitRequest {
        network: Some(on),
        ..InitRequest::default()
    };
    connect(vsock)?
        .init(&request)
        .context("cannot switch the guest's network card")
}

fn warm_up(vsock: &Path) -> Result<()> {
    let mut agent = connect(vsock)?;
    for command in WARM_UP {
        for _ in 0..WARM_UP_RUNS {
            run(&mut agent, command)?;
        }
    }
    // Dirty pages in the snapshot would be written back by every clone.
    run(&mut agent, &["/bin/sync"])
}

/// Runs a command as the sandbox's default user.
pub(crate) fn run(agent: &mut EnvdClient, command: &[&str]) -> Result<()> {
    run_as(agent, None, command, ANSWER_TIMEOUT)
}

pub(crate) fn run_as_root(
    agent: &mut EnvdClient,
    command: &[&str],
    timeout: Duration,
) -> Result<()> {
    run_as(agent, Some("root"), command, timeout)
}

fn run_as(
    agent: &mut EnvdClient,
    user: Option<&str>,
    command: &[&str],
    timeout: Duration,
) -> Result<()> {
    let (program, arguments) = command.split_first().context("an empty command")?;
    let request = ExecRequest {
        user: user.map(str::to_owned),
        ..ExecRequest::new(*program, arguments)
    };
    let output = agent
        .exec(&request, timeout)
        .with_context(|| format!("cannot run {command:?} in the guest"))?;
    ensure!(
        output.exited && output.exit_code == 0,
        "{command:?} failed in the guest with status {}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
