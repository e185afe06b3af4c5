//! Detaches the mounts that a killed image build left behind, so that removing its tree does not delete files through a
//! mount.

use std::{fs, path::Path};

use anyhow::{Context, Result};
use nix::mount::{MntFlags, umount2};

/// Detaches every mount point below `dir`, the deepest first.
pub(crate) fn detach_below(dir: &Path) -> Result<()> {
    let table =
        fs::read_to_string("/proc/self/mountinfo").context("cannot read the mount table")?;
    let mut points: Vec<_> = points(&table)
        .into_iter()
        .filter(|point| Path::new(point).starts_with(dir))
        .collect();
    points.sort_by_key(|point| std::cmp::Reverse(point.len()));
    for point in points {
        umount2(point.as_str(), MntFlags::MNT_DETACH).with_context(|| {
            format!("cannot unmount {point}, a leftover of an interrupted build")
        })?;
    }
    Ok(())
}

/// The mount points in a mountinfo table: the fifth field of each line (proc(5)), with the octal escapes of spaces and
/// backslashes decoded.
fn points(table: &str) -> Vec<String> {
    table
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .map(|point| point.replace("\\040", " ").replace("\\134", "\\"))
        .collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn mount_points_are_parsed_and_unescaped() {
        let table =
            "22 1 8:1 / / rw - ext4 /dev/vda rw\n30 22 0:5 / /a\\040b/proc rw - proc proc rw\n";
        assert_eq!(super::points(table), ["/", "/a b/proc"]);
    }
}
