//! Steps on guests that end, on a killed VMM, and on damaged templates.

use std::{
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use model::{MANIFEST_NAME, template_file};

use super::state::{ONE, State};
use crate::vm::Vm;

/// A sysrq key, and a part of the exit reason that the VMM then reports.
const EXIT_REASONS: [(&str, &str); 3] = [
    ("o", "powered off"),
    ("b", "requested a reboot"),
    ("c", "crashed"),
];

/// A power-off, a reboot and a crash of the guest are reported as different exit reasons.
pub(super) fn ends(state: &mut State<'_>) -> Result<String> {
    for (key, expected) in EXIT_REASONS {
        let mut clone = Vm::restore(state.config, &state.template(ONE))?;
        // Delayed, so that this command returns before the guest ends.
        clone.sh(&format!(
            "(sleep 0.2; echo {key} > /proc/sysrq-trigger) > /dev/null 2>&1 &"
        ))?;
        let deadline = Instant::now() + Duration::from_secs(30);
        let reason = loop {
            if let Some(reason) = clone.process.control.stats()?.exit_reason {
                break reason;
            }
            ensure!(
                Instant::now() < deadline,
                "the guest still runs 30 s after sysrq {key:?}"
            );
            thread::sleep(Duration::from_millis(20));
        };
        ensure!(
            reason.contains(expected),
            "sysrq {key:?} was reported as {reason:?}, not {expected:?}"
        );
    }
    Ok("power-off, reboot, crash".to_owned())
}

/// After a VMM is killed with SIGKILL, another clone of the same template starts.
pub(super) fn kill(state: &mut State<'_>) -> Result<String> {
    let clone = state.clones.pop().context("no clone is running")?;
    let pid = clone.process.pid();
    clone.process.kill()?;
    ensure!(
        !Path::new(&format!("/proc/{pid}")).exists(),
        "process {pid} still exists after SIGKILL"
    );
    let next = Vm::restore(state.config, &state.template(ONE))?;
    ensure!(
        next.sh("cat /root/mark")? == "kept",
        "/root/mark is lost in the clone"
    );
    state.clones.push(next);
    Ok(String::new())
}

/// The name of a kind of damage to a template, the function that causes it, and a part of the expected error.
type Damage = (&'static str, fn(&Path) -> Result<()>, &'static str);

const DAMAGES: [Damage; 5] = [
    (
        "shorter memory",
        shorten_memory,
        "bytes, but the manifest says",
    ),
    ("a changed bit", change_state, "SHA-256 differs"),
    ("another format", other_format, "template has format"),
    (
        "another platform",
        other_platform,
        "template is for platform",
    ),
    ("no manifest", remove_manifest, "cannot read"),
];

/// A damaged template is refused with the reason.
pub(super) fn bad_snapshots(state: &mut State<'_>) -> Result<String> {
    let good = state.template(ONE);
    let bad = state.template("bad");
    for (what, make, reason) in DAMAGES {
        copy(&good, &bad)?;
        make(&bad).with_context(|| format!("cannot make {what}"))?;
        let refused = match Vm::restore_paused(state.config, &bad) {
            Ok(_) => bail!("a template with {what} was restored"),
            Err(error) => format!("{error:#}"),
        };
        ensure!(
            refused.contains(reason),
            "a template with {what} was refused with {refused:?}, expected {reason:?}"
        );
        fs::remove_dir_all(&bad)?;
    }
    Ok(format!("{} refused with their reasons", DAMAGES.len()))
}

/// Copies a template. The large files are hard links: none of the functions below changes them in place.
fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir(to)?;
    for name in [template_file::STATE, MANIFEST_NAME] {
        fs::copy(from.join(name), to.join(name))?;
    }
    for name in [template_file::MEMORY, template_file::LAYER] {
        fs::hard_link(from.join(name), to.join(name))?;
    }
    Ok(())
}

fn shorten_memory(dir: &Path) -> Result<()> {
    let path = dir.join(template_file::MEMORY);
    fs::remove_file(&path)?;
    Ok(fs::File::create(path)?.set_len(1 << 20)?)
}

fn change_state(dir: &Path) -> Result<()> {
    let path = dir.join(template_file::STATE);
    let mut bytes = fs::read(&path)?;
    if let Some(last) = bytes.last_mut() {
        *last ^= 1;
    }
    Ok(fs::write(path, bytes)?)
}

fn edit(dir: &Path, key: &str, value: serde_json::Value) -> Result<()> {
    let path = dir.join(MANIFEST_NAME);
    let mut manifest: serde_json::Value = serde_json::from_slice(&fs::read(&path)?)?;
    manifest[key] = value;
    Ok(fs::write(path, serde_json::to_vec(&manifest)?)?)
}

fn other_format(dir: &Path) -> Result<()> {
    edit(dir, "format", 9999.into())
}

fn other_platform(dir: &Path) -> Result<()> {
    edit(dir, "platform", "ring3".into())
}

fn remove_manifest(dir: &Path) -> Result<()> {
    Ok(fs::remove_file(dir.join(MANIFEST_NAME))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn append_sources(dir: &Path, text: &mut String) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                append_sources(&path, text);
            } else if path.extension().is_some_and(|ending| ending == "rs") {
                text.push_str(&fs::read_to_string(&path).unwrap());
            }
        }
    }

    /// The steps run only in the tier `hvm`. Without this test, a changed text would be noticed only minutes into that
    /// tier.
    #[test]
    fn expected_texts_occur_in_the_sources_of_the_vmm() {
        let vmm = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../vmm/src");
        let mut text = String::new();
        append_sources(&vmm, &mut text);
        let reasons = EXIT_REASONS.map(|(_, reason)| reason);
        let refusals = DAMAGES.map(|(_, _, reason)| reason);
        for expected in reasons.iter().chain(&refusals).chain(&["it lacks: "]) {
            assert!(text.contains(expected), "{expected:?}");
        }
    }
}
