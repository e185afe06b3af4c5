//! A VM under test: its VMM process, its guest agent, its console.

use std::{
    fs,
    os::fd::AsFd,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use envd::{ENVD_PORT, EnvdClient, ExecRequest};
use model::{Bytes, GuestPaths, HypercallPath, RestoreSpec, VmSpec, WorkingSetPrefault};
use vmm_control::{VmProcess, fresh_identity};

use crate::{config::Config, tap::Tap};

/// Timeout of each response from the VMM or the agent. An emulated host is a hundred times slower than a real one.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(240);
/// Guest memory. Small, because every snapshot computes a checksum over all of it.
pub(crate) const MEMORY: Bytes = Bytes::mib(160);

/// A running VM. Its process is killed on drop.
#[derive(Debug)]
pub(crate) struct Vm {
    pub(crate) process: VmProcess,
    pub(crate) hostname: String,
    vsock: PathBuf,
    console: PathBuf,
}

impl Vm {
    /// Boots a VM and waits for its agent.
    pub(crate) fn boot(
        config: &Config,
        (memory, vcpus): (Bytes, u8),
        tap: Option<&Tap>,
    ) -> Result<Self> {
        let mut vm = Self::process(config)?;
        let file = |name: &str| config.guest.join(name);
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

    /// Restores a clone of `template`, resumes it and waits for its agent.
    pub(crate) fn restore(config: &Config, template: &Path) -> Result<Self> {
        let mut vm = Self::restore_paused(config, template)?;
        vm.process.control.resume()?;
        vm.identify()?;
        Ok(vm)
    }

    pub(crate) fn restore_paused(config: &Config, template: &Path) -> Result<Self> {
        let mut vm = Self::process(config)?;
        let spec = RestoreSpec {
            template: template.to_owned(),
            base: None,
            root: None,
            vsock: vm.vsock.clone(),
            console: Some(vm.console.clone()),
            layer_limit: None,
            prefault: WorkingSetPrefault::On,
        };
        vm.process.control.restore(spec, None)?;
        Ok(vm)
    }

    fn process(config: &Config) -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok(Self {
            process: VmProcess::spawn(&config.vmm, None, Some(ANSWER_TIMEOUT))?,
            hostname: format!("clone-{id}"),
            vsock: config.work.join(format!("{id}.sock")),
            console: config.work.join(format!("{id}.console")),
        })
    }

    fn identify(&mut self) -> Result<()> {
        let identity = fresh_identity(&self.hostname)?;
        let ready = self.process.control.identity(identity, ANSWER_TIMEOUT);
        ready.map(|_| ()).with_context(|| self.console_tail())
    }

    /// The last lines of the guest's console, with a heading.
    pub(crate) fn console_tail(&self) -> String {
        let text = fs::read(&self.console).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<_> = text.lines().collect();
        let end = lines[lines.len().saturating_sub(20)..].join("\n");
        format!("last lines of the guest's console:\n{end}\n")
    }

    pub(crate) fn agent(&self) -> Result<EnvdClient> {
        EnvdClient::connect(&self.vsock, ENVD_PORT, ANSWER_TIMEOUT)
            .context("cannot reach the guest agent")
    }

    /// Runs a shell script as root and returns its trimmed standard output.
    pub(crate) fn sh(&self, script: &str) -> Result<String> {
        let mut request = ExecRequest::new("/bin/bash", &["-ec", script]);
        request.user = Some("root".to_owned());
        let output = self
            .agent()?
            .exec(&request, ANSWER_TIMEOUT)
            .with_context(|| format!("cannot run {script:?} in the guest"))?;
        ensure!(
            output.exited && output.exit_code == 0,
            "{script:?} failed in the guest with status {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8(output.stdout)?.trim().to_owned())
    }
}
