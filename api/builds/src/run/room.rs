//! Disk size of a build.

use model::Bytes;
use pool::TemplateInfo;

use crate::{command::Command, machine::Machine, settings::Settings};

/// The file system's own share of a disk is less than 1/64.
const METADATA: u64 = 64;
/// Sizes are multiples of this.
const UNIT: Bytes = Bytes::mib(128);
/// Prints the free blocks of the disk, and the size of a block.
const FREE: &str = "stat -f -c '%a %S' /";

/// The disk size that leaves `min_free` free. If the current size suffices, it is kept. A larger disk also gets room
/// for the data that steps will write, because each resize copies the layer.
pub(super) fn size(disk: &TemplateInfo, min_free: Bytes) -> Bytes {
    // Files deleted in the guest may still be counted.
    let used = disk.bytes.0.min(disk.disk.0);
    let need = used + min_free.0;
    if disk.disk.0 - disk.disk.0 / METADATA >= need {
        return disk.disk;
    }
    Bytes((disk.disk.0 + need).next_multiple_of(UNIT.0))
}

/// Checks in the guest that `min_free` is free.
pub(super) async fn check(machine: &Machine, min_free: Bytes) -> Result<(), String> {
    if min_free.0 == 0 {
        return Ok(());
    }
    let command = Command::of_root(FREE, &[], &Settings::default());
    let asked = machine.guest.capture(&command).await;
    let (output, ended) = asked.map_err(|why| why.to_string())?;
    ended.map_err(|why| format!("cannot read the free space of the disk: {why}"))?;
    let free = free(&String::from_utf8_lossy(&output.stdout)).unwrap_or(0);
    if free >= min_free.0 {
        return Ok(());
    }
    let (free, asked) = (free >> 20, min_free.0 >> 20);
    Err(format!(
        "the disk has {free} MiB of free space, and minFreeDiskMb is {asked}: the start command wrote too much, or the \
         template `base` of this server is of a release whose guests cannot enlarge a disk (build it again)"
    ))
}

/// Parses the output of [`FREE`].
fn free(text: &str) -> Option<u64> {
    let (blocks, bytes) = text.trim().split_once(' ')?;
    let (blocks, bytes) = (blocks.parse::<u64>().ok()?, bytes.parse::<u64>().ok()?);
    blocks.checked_mul(bytes)
}

#[cfg(test)]
mod tests {
    use pool::TemplateKind;

    use super::*;

    fn disk(size_mib: u64, used_mib: u64) -> TemplateInfo {
        TemplateInfo {
            id: "id".to_owned(),
            names: Vec::new(),
            memory: Bytes::mib(512),
            vcpus: 1,
            disk: Bytes::mib(size_mib),
            created_unix_s: 1,
            kind: TemplateKind::Disk,
            source: None,
            spawned: 0,
            warm: 0,
            vmm: None,
            bytes: Bytes::mib(used_mib),
        }
    }

    #[test]
    fn a_disk_grows_if_the_free_space_would_not_suffice() {
        let of = |size_mib, used_mib, free_mib| {
            size(&disk(size_mib, used_mib), Bytes::mib(free_mib)).0 >> 20
        };
        assert_eq!(of(4096, 1000, 0), 4096);
        assert_eq!(of(4096, 32, 4000), 4096);
        assert_eq!(of(4096, 33, 4000), 8192);
        assert_eq!(of(4096, 1, 8192), 12416);
        assert_eq!(of(12416, 4000, 8192), 12416, "the steps have room");
        for (used, free) in [(0, 65536), (4096, 65536), (5000, 1)] {
            let size = of(4096, used, free);
            assert!(size - size / METADATA >= used.min(4096) + free, "{size}");
        }
    }

    #[test]
    fn free_space_is_read_in_bytes() {
        assert_eq!(free("1036288 4096\n"), Some(4_244_635_648));
        for wrong in ["", "4096", "a b", "18446744073709551615 4096", "-1 4096"] {
            assert_eq!(free(wrong), None, "{wrong}");
        }
    }
}
