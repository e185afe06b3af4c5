//! Shared by the examples: the configuration of a pool, arguments, quantiles.

use std::{
    error::Error,
    path::{Path, PathBuf},
    time::Duration,
};

use pool::{MissingLimits, PoolConfig, WarmMarks};

pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) type Failure = Box<dyn Error + Send + Sync>;

/// The argument with this number, or a default.
pub(crate) fn number(at: usize, or: u32) -> Result<u32, Failure> {
    Ok(std::env::args().nth(at).map_or(Ok(or), |a| a.parse())?)
}

pub(crate) fn variable(name: &str) -> Result<PathBuf, Failure> {
    let value = std::env::var_os(name).map(PathBuf::from);
    Ok(value.ok_or(format!("{name} is not set"))?)
}

/// A pool of the installed templates, with `warm` warm slots of each and without a network.
pub(crate) fn config(state: &Path, warm: u32) -> Result<PoolConfig, Failure> {
    Ok(PoolConfig {
        installed_templates: Some(variable("CUBE_ARTIFACTS")?.join("templates")),
        images: vec![variable("CUBE_ARTIFACTS")?],
        warm: WarmMarks {
            low: warm,
            high: warm,
        },
        warm_slots: if warm == 0 { 0 } else { 1000 },
        missing_limits: MissingLimits::Allow,
        start_timeout: PATIENCE,
        adopt_timeout: PATIENCE,
        ..PoolConfig::new(variable("CUBE_BIN")?.join("cube-vmm"), state.to_owned())
    })
}

/// The quantile at `percent` by nearest rank. NaN if there are no values.
pub(crate) fn quantile(values: &mut [f64], percent: usize) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = (values.len() * percent).div_ceil(100).saturating_sub(1);
    values.get(at).copied().unwrap_or(f64::NAN)
}
