//! Linux's 64-bit boot protocol ("The Linux/x86 Boot Protocol"): the ELF kernel at its physical addresses, a zero page
//! with the boot parameters, and identity page tables for the first GiB.
//!
//! ```text
//! 0x00500 GDT   0x07000 zero page   0x08ff0 stack   0x09000 page tables   0x20000 command line
//! 0xe0000 ACPI tables   0x100000 on: kernel   initramfs: at the end of the RAM below the hole
//! ```

use std::{
    fs::File,
    io::{Seek, SeekFrom},
};

use linux_loader::{
    configurator::{BootConfigurator, BootParams, linux::LinuxBootConfigurator},
    loader::{
        Elf, KernelLoader,
        bootparam::{boot_e820_entry, boot_params},
    },
};
use vm_memory::{Bytes, GuestAddress};

use super::{acpi, error::HvmError, map::HOLE};
use crate::{devices::Ram, platform::ring3::BootFiles};

pub(super) const GDT: u64 = 0x500;
/// Null, unused, 64-bit code, data. Linux calls the selectors of the last two `__BOOT_CS` and `__BOOT_DS`.
pub(super) const GDT_ENTRIES: [u64; 4] = [0, 0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff];
/// Offset of the last byte of the GDT.
pub(super) const GDT_LIMIT: u16 = 31;
pub(super) const ZERO_PAGE: u64 = 0x7000;
pub(super) const STACK: u64 = 0x8ff0;
pub(super) const PAGE_TABLES: u64 = 0x9000;
const CMDLINE: u64 = 0x2_0000;
const CMDLINE_MAX: usize = 2048;
/// End of the memory below the BIOS area.
const LOW_END: u64 = 0x9_fc00;
const HIGH_START: u64 = 0x10_0000;

const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;

/// Loads the kernel, initramfs and boot structures. Returns the kernel's entry address.
pub(super) fn load(
    ram: &Ram,
    bytes: u64,
    vcpus: u8,
    devices: usize,
    files: BootFiles<'_>,
) -> Result<u64, HvmError> {
    let start = GuestAddress(HIGH_START);
    let kernel = Elf::load(ram, None, files.kernel, Some(start)).map_err(HvmError::Kernel)?;
    let initrd = load_initrd(ram, bytes, kernel.kernel_end, files.initrd)?;
    let room = |_| HvmError::Room("the command line");
    if files.cmdline.len() >= CMDLINE_MAX {
        return Err(HvmError::Room("the command line"));
    }
    let cmdline = [files.cmdline.as_bytes(), &[0]].concat();
    ram.write_slice(&cmdline, GuestAddress(CMDLINE))
        .map_err(room)?;
    let rsdp = acpi::write(ram, vcpus, devices)?;
    write_zero_page(ram, bytes, &cmdline, initrd, rsdp)?;
    write_tables(ram).map_err(|_| HvmError::Room("page tables"))?;
    Ok(kernel.kernel_load.0)
}

/// Loads the initramfs, page-aligned, at the end of the RAM below the hole, because the protocol has 32 bits for its
/// address. Returns address and length.
fn load_initrd(
    ram: &Ram,
    bytes: u64,
    kernel_end: u64,
    file: &mut File,
) -> Result<(u32, u32), HvmError> {
    const STEP: &str = "read the initramfs";
    let failed = |e| HvmError::Boot(STEP, e);
    let length = file.seek(SeekFrom::End(0)).map_err(failed)?;
    file.rewind().map_err(failed)?;
    let room = || HvmError::Room("the initramfs");
    let end = bytes.min(HOLE.start);
    let at = end.checked_sub(length).ok_or_else(room)? & !0xfff;
    if at < kernel_end {
        return Err(room());
    }
    let count = usize::try_from(length).map_err(|_| room())?;
    ram.read_exact_volatile_from(GuestAddress(at), file, count)
        .map_err(|e| HvmError::Boot(STEP, std::io::Error::other(e)))?;
    let word = |n| u32::try_from(n).map_err(|_| room());
    Ok((word(at)?, word(length)?))
}

fn write_zero_page(
    ram: &Ram,
    bytes: u64,
    cmdline: &[u8],
    initrd: (u32, u32),
    rsdp: u64,
) -> Result<(), HvmError> {
    let mut params = boot_params::default();
    params.hdr.boot_flag = 0xaa55;
    // "HdrS"
    params.hdr.header = 0x5372_6448;
    // A boot loader without an assigned number.
    params.hdr.type_of_loader = 0xff;
    params.hdr.kernel_alignment = 0x100_0000;
    params.hdr.cmd_line_ptr = u32::try_from(CMDLINE).unwrap_or(0);
    params.hdr.cmdline_size = u32::try_from(cmdline.len()).unwrap_or(0);
    (params.hdr.ramdisk_image, params.hdr.ramdisk_size) = initrd;
    params.acpi_rsdp_addr = rsdp;
    let map = memory_map(bytes);
    params.e820_entries = u8::try_from(map.len()).unwrap_or(0);
    for (entry, (from, to, r#type)) in params.e820_table.iter_mut().zip(map) {
        *entry = boot_e820_entry {
            addr: from,
            size: to - from,
            r#type,
        };
    }
    let params = BootParams::new(&params, GuestAddress(ZERO_PAGE));
    LinuxBootConfigurator::write_bootparams(&params, ram)
        .map_err(|_| HvmError::Room("the zero page"))
}

/// The e820 map: start, end and type of each range of guest-physical addresses.
fn memory_map(bytes: u64) -> Vec<(u64, u64, u32)> {
    let mut map = vec![
        (0, LOW_END, E820_RAM),
        (acpi::TABLES, HIGH_START, E820_RESERVED),
        (HIGH_START, bytes.min(HOLE.start), E820_RAM),
    ];
    if let Some(above) = bytes.checked_sub(HOLE.start).filter(|above| *above > 0) {
        map.push((HOLE.end, HOLE.end + above, E820_RAM));
    }
    map
}

/// Writes the GDT, and page tables for the first GiB in pages of 2 MiB.
fn write_tables(ram: &Ram) -> Result<(), vm_memory::GuestMemoryError> {
    const PRESENT_WRITABLE: u64 = 3;
    const LARGE: u64 = 1 << 7;
    for (i, entry) in (0..).zip(GDT_ENTRIES) {
        ram.write_obj(entry, GuestAddress(GDT + i * 8))?;
    }
    let (pdpt, pd) = (PAGE_TABLES + 0x1000, PAGE_TABLES + 0x2000);
    ram.write_obj(pdpt | PRESENT_WRITABLE, GuestAddress(PAGE_TABLES))?;
    ram.write_obj(pd | PRESENT_WRITABLE, GuestAddress(pdpt))?;
    for i in 0..512_u64 {
        let entry = i << 21 | LARGE | PRESENT_WRITABLE;
        ram.write_obj(entry, GuestAddress(pd + i * 8))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Memory;

    /// The map offers exactly the guest's RAM, except the range from [`LOW_END`] to [`HIGH_START`].
    #[test]
    fn the_map_is_the_memory() {
        let gib = 1 << 30;
        for bytes in [128 << 20, 3 * gib, 3 * gib + (2 << 20), 4 * gib, 8 * gib] {
            let memory = Memory::anonymous(bytes, Some(HOLE)).unwrap();
            let map = memory_map(bytes);
            let usable: u64 = map
                .iter()
                .filter(|(.., kind)| *kind == E820_RAM)
                .map(|(from, to, _)| to - from)
                .sum();
            assert_eq!(usable, bytes - (HIGH_START - LOW_END));
            for (from, to, _) in map {
                for at in [from, to - 1] {
                    assert!(
                        memory.ram.read_obj::<u8>(GuestAddress(at)).is_ok(),
                        "{at:#x}"
                    );
                }
            }
        }
    }
}
