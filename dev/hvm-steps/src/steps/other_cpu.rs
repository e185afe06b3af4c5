//! Steps on a template that is restored on another CPU. They run on several emulated hosts: one keeps a template on a
//! disk that the others see.

use std::{
    fs::{self, File},
    io::{self, Read as _, Seek as _, SeekFrom},
    path::Path,
};

use anyhow::{Context as _, Result, bail, ensure};
use model::{MANIFEST_NAME, template_file};
use nix::{
    errno::Errno,
    unistd::{Whence, lseek},
};

use super::state::{ONE, State};
use crate::vm::Vm;

/// The expected outcome of a template that this CPU can run.
const RESTORES: &str = "restores";

/// Copies a template to the disk that other hosts see, for [`templates`].
pub(super) fn keep(state: &mut State<'_>) -> Result<String> {
    let Some(kept) = &state.config.kept else {
        return Ok("skipped: this host is not emulated".to_owned());
    };
    let keep = &state.config.keep;
    let (from, to) = (
        state.template(ONE),
        kept.join(keep.as_deref().unwrap_or(ONE)),
    );
    fs::create_dir(&to)?;
    for name in [template_file::STATE, MANIFEST_NAME] {
        fs::copy(from.join(name), to.join(name))?;
    }
    for name in [template_file::MEMORY, template_file::LAYER] {
        let bytes = fs::metadata(from.join(name))?.len();
        let file = File::create(to.join(name))?;
        file.set_len(bytes)?;
        // Of a template that is refused, only the lengths matter: no content is read before.
        if keep.is_some() {
            copy_data(&File::open(from.join(name))?, &file)?;
        }
    }
    Ok("the template of this CPU".to_owned())
}

/// Copies the data of a file with holes.
fn copy_data(mut from: &File, mut to: &File) -> Result<()> {
    let mut at = 0;
    loop {
        let start = match lseek(from, at, Whence::SeekData) {
            Err(Errno::ENXIO) => return Ok(()),
            other => other?,
        };
        at = lseek(from, start, Whence::SeekHole)?;
        let (start, end) = (u64::try_from(start)?, u64::try_from(at)?);
        from.seek(SeekFrom::Start(start))?;
        to.seek(SeekFrom::Start(start))?;
        io::copy(&mut from.take(end - start), &mut to)?;
    }
}

/// Each template of another host has the expected outcome: it is restored and runs, or it is refused with these
/// features, and after `*` with others. `amd:AuthenticAMD` and `one:aes+bmi2` are refused, `old:restores` runs.
pub(super) fn templates(state: &mut State<'_>) -> Result<String> {
    let mut notes = Vec::new();
    for template in &state.config.templates {
        let (name, expected) = template.split_once(':').context(template.clone())?;
        let kept = state.config.kept.as_deref();
        let dir = kept.context("the disk with the templates is not mounted")?;
        let note = outcome(state, &dir.join(name), expected)?;
        notes.push(format!("{name}: {note}"));
    }
    Ok(notes.join("; "))
}

fn outcome(state: &State<'_>, template: &Path, expected: &str) -> Result<String> {
    if expected == RESTORES {
        let clone = Vm::restore(state.config, template)?;
        let mark = clone.sh("cat /root/mark; date > /root/now; sync")?;
        ensure!(mark == "kept", "/root/mark is lost in the clone");
        return Ok(RESTORES.to_owned());
    }
    let refused = match Vm::restore_paused(state.config, template) {
        Ok(_) => bail!("the template was restored, expected {expected}"),
        Err(error) => format!("{error:#}"),
    };
    ensure!(
        is_as_expected(&refused, expected),
        "expected {expected}, was refused with: {refused}"
    );
    let (_, lacks) = refused.split_once("it lacks: ").unwrap_or_default();
    Ok(format!("refused, lacks {}", lacks.trim()))
}

/// Whether each expected text is in one missing feature, and each missing feature has one of the texts. `*` is in all.
fn is_as_expected(refused: &str, expected: &str) -> bool {
    let Some((_, lacks)) = refused.split_once("it lacks: ") else {
        return false;
    };
    let lacks: Vec<&str> = lacks.trim().split(", ").collect();
    let expected: Vec<&str> = expected.split('+').collect();
    let fits = |lack: &str, text: &str| text == "*" || lack.contains(text);
    expected
        .iter()
        .all(|text| lacks.iter().any(|l| fits(l, text)))
        && lacks
            .iter()
            .all(|l| expected.iter().any(|text| fits(l, text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_must_name_exactly_the_expected_features() {
        let refused = "this CPU (A) cannot run the template of another (B), it lacks: aes, bmi2";
        for (expected, holds) in [
            ("aes+bmi2", true),
            ("bmi2+aes", true),
            ("aes", false),
            ("aes+bmi2+avx", false),
            ("aes+*", true),
            ("avx+*", false),
        ] {
            assert_eq!(is_as_expected(refused, expected), holds, "{expected}");
        }
        assert!(!is_as_expected("cannot read the manifest: aes", "aes"));
    }

    #[test]
    fn a_file_with_holes_is_copied() {
        let (from, to) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let write = |at, data: &[u8]| std::os::unix::fs::FileExt::write_all_at(&from, data, at);
        write(5 << 20, b"middle").unwrap();
        write(0, b"start").unwrap();
        from.set_len(9 << 20).unwrap();
        to.set_len(9 << 20).unwrap();
        copy_data(&from, &to).unwrap();
        let read = |mut file: &File| {
            let mut all = Vec::new();
            file.rewind().unwrap();
            file.read_to_end(&mut all).unwrap();
            all
        };
        assert_eq!(read(&from), read(&to));
    }
}
