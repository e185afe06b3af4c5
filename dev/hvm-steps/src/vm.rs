//! One VM under test: its process, its agent, its console.

use std::{
    fs,
    os::fd::AsFd,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use api_types::envd::{ENVD_PORT, EnvdClient, ExecRequest};
use model::{Bytes, GuestPaths, HypercallPath, RestoreSpec, VmSpec, WorkingSetPrefault};
use vmm_control::{VmProcess, fresh_identity};

use crate::{steps::Places, tap::Tap};

/// For any single answer. An emulated host is a hundred times slower than a real one.
pub(crate) const PATIENCE: Duration = Duration::from_secs(240);
/// Little, since every byte of it is summed in each snapshot.
pub(crate) const MEMORY: Bytes = Bytes::mib(160);

/// Killed when dropped.
#[derive(Debug)]
pub(crate) struct Vm {
    pub(crate) process: VmProcess,
    pub(crate) hostname: String,
    vsock: PathBuf,
    console: PathBuf,
}

impl Vm {
    /// Boots and waits for the agent.
    pub(crate) fn boot(
        places: &Places,
        (memory, vcpus): (Bytes, u8),
        tap: Option<&Tap>,
    ) -> Result<Self> {
        let mut vm = Self::process(places)?;
        let file = |name: &str| places.guest.join(name);
        let spec = VmSpec {
            memory,
            vcpus,
            guest: GuestPaths {
                kernel: file("vmlinux"),
                initrd: file("initramfs.cpio"),
                root: file("base.erofs"),
                layer: file("layer.ext4"),
            },
            cmdline: String::new(),
            hypercalls: HypercallPath::default(),
            vsock: vm.vsock.clone(),
            console: Some(vm.console.clone()),
            layer_limit: None,
        };
        let tap = tap.map(|tap| tap.fd.as_fd());
        vm.process.control.boot(spec, tap)?;
        vm.identify()?;
        Ok(vm)
    }

    /// Restores, resumes and waits for the agent.
    pub(crate) fn restore(places: &Places, template: &Path) -> Result<Self> {
        let mut vm = Self::restore_paused(places, template)?;
        vm.process.control.resume()?;
        vm.identify()?;
        Ok(vm)
    }

    pub(crate) fn restore_paused(places: &Places, template: &Path) -> Result<Self> {
        let mut vm = Self::process(places)?;
        let spec = RestoreSpec {
            template: template.to_owned(),
            base: None,
            vsock: vm.vsock.clone(),
            console: Some(vm.console.clone()),
            layer_limit: None,
            prefault: WorkingSetPrefault::On,
        };
        vm.process.control.restore(spec, None)?;
        Ok(vm)
    }

    fn process(places: &Places) -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok(Self {
            process: VmProcess::spawn(&places.vmm, None, Some(PATIENCE))?,
            hostname: format!("clone-{id}"),
            vsock: places.work.join(format!("{id}.sock")),
            console: places.work.join(format!("{id}.console")),
        })
    }

    fn identify(&mut self) -> Result<()> {
        let identity = fresh_identity(&self.hostname)?;
        let ready = self.process.control.identity(identity, PATIENCE);
        ready.map(|_| ()).with_context(|| self.last_words())
    }

    /// What the guest printed last.
    pub(crate) fn last_words(&self) -> String {
        let text = fs::read(&self.console).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<_> = text.lines().collect();
        let end = lines[lines.len().saturating_sub(20)..].join("\n");
        format!("the end of the guest's console:\n{end}\n")
    }

    pub(crate) fn agent(&self) -> Result<EnvdClient> {
        EnvdClient::connect(&self.vsock, ENVD_PORT, PATIENCE).context("cannot reach the agent")
    }

    /// Runs a shell script as root; its standard output without white space at the ends.
    pub(crate) fn sh(&self, script: &str) -> Result<String> {
        let mut request = ExecRequest::new("/bin/bash", &["-ec", script]);
        request.user = Some("root".to_owned());
        let output = self
            .agent()?
            .exec(&request, PATIENCE)
            .with_context(|| format!("{script:?} did not run"))?;
        ensure!(
            output.exited && output.exit_code == 0,
            "{script:?} ended with {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8(output.stdout)?.trim().to_owned())
    }
}
