//! Steps on a template that is restored on a CPU with fewer features. They run on two emulated hosts: the first keeps a
//! template on a disk that the second one sees.

use std::fs;

use anyhow::{Context as _, Result, bail, ensure};
use model::{MANIFEST_NAME, template_file};

use super::state::{ONE, State};
use crate::vm::Vm;

/// Copies a template to the disk that both hosts see, for [`lesser_cpu`].
pub(super) fn keep(state: &mut State<'_>) -> Result<String> {
    let Some(kept) = &state.config.kept else {
        return Ok("skipped: this host is not emulated".to_owned());
    };
    let (from, to) = (state.template(ONE), kept.join(ONE));
    fs::create_dir(&to)?;
    for name in [template_file::STATE, MANIFEST_NAME] {
        fs::copy(from.join(name), to.join(name))?;
    }
    // Of the large files, only the lengths matter: the restore checks them and is then refused before it reads content.
    for name in [template_file::MEMORY, template_file::LAYER] {
        let bytes = fs::metadata(from.join(name))?.len();
        fs::File::create(to.join(name))?.set_len(bytes)?;
    }
    Ok("the template of this CPU".to_owned())
}

/// A template of a CPU with more features is refused, and the error lists each missing feature.
pub(super) fn lesser_cpu(state: &mut State<'_>) -> Result<String> {
    let kept = state
        .config
        .kept
        .as_ref()
        .context("the disk with the template is not mounted")?;
    let expected = state.config.lacking.as_deref().unwrap_or_default();
    let refused = match Vm::restore_paused(state.config, &kept.join(ONE)) {
        Ok(_) => bail!("the template was restored on a CPU without {expected}"),
        Err(error) => format!("{error:#}"),
    };
    let (_, lacks) = refused.split_once("it lacks: ").context(refused.clone())?;
    let mut named: Vec<_> = lacks.trim().split(", ").collect();
    let mut wanted: Vec<_> = expected.split(',').collect();
    named.sort_unstable();
    wanted.sort_unstable();
    ensure!(
        named == wanted,
        "expected {expected} as the missing features: {refused}"
    );
    Ok(format!("refused: lacks {}", named.join(", ")))
}
