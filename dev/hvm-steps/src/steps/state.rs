//! The state that steps pass on to later steps.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context, Result};
use model::{MANIFEST_NAME, TemplateManifest};

use crate::{config::Config, tap::Tap, vm::Vm};

/// Name of the template of a VM with four vCPUs.
pub(super) const SMP: &str = "smp";
/// Name of the template of the VM that `boot` started.
pub(super) const ONE: &str = "one";

#[derive(Debug)]
pub(super) struct State<'a> {
    pub(super) config: &'a Config,
    pub(super) tap: Option<Tap>,
    /// The VM that `boot` started.
    pub(super) vm: Option<Vm>,
    pub(super) clones: Vec<Vm>,
}

impl<'a> State<'a> {
    pub(super) fn new(config: &'a Config) -> Self {
        Self {
            config,
            tap: None,
            vm: None,
            clones: Vec::new(),
        }
    }

    pub(super) fn vm(&mut self) -> Result<&mut Vm> {
        self.vm.as_mut().context("no VM is running")
    }

    pub(super) fn template(&self, name: &str) -> PathBuf {
        self.config.work.join(name)
    }
}

/// Run times of the parts of a step, as texts.
pub(super) struct Laps {
    texts: Vec<String>,
    lap_start: Instant,
}

impl Laps {
    pub(super) fn start() -> Self {
        Self {
            texts: Vec::new(),
            lap_start: Instant::now(),
        }
    }

    /// Ends the current part.
    pub(super) fn lap(&mut self, part: &str) {
        let seconds = self.lap_start.elapsed().as_secs_f64();
        self.lap_start = Instant::now();
        self.texts.push(format!("{part} {seconds:.1} s"));
    }

    pub(super) fn summary(&self) -> String {
        self.texts.join(", ")
    }
}

pub(super) fn manifest(template: &Path) -> Result<TemplateManifest> {
    let path = template.join(MANIFEST_NAME);
    let text = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(serde_json::from_slice(&text)?)
}
