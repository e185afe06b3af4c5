//! ACPI tables. The distribution's kernel needs them to find its processors and devices: it does not support MP tables
//! and takes no virtio-mmio devices from its command line.
//!
//! The machine is hardware-reduced (ACPI 6.5, 4.1): it has no PM timer, legacy interrupt controller, keyboard
//! controller or CMOS clock. Sleep and reset are one port each.

use acpi_tables::{
    Aml, aml,
    fadt::{FADTBuilder, Flags},
    gas::{AccessSize, AddressSpace, GAS},
    madt::{EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic},
    rsdp::Rsdp,
    sdt::Sdt,
    xsdt::XSDT,
};
use vm_memory::{Bytes, GuestAddress};

use super::{
    error::HvmError,
    map::{DEVICE_GSI, REGISTERS, SERIAL_GSI},
    ports,
};
use crate::devices::{Ram, SLOT_STRIDE};

/// Address of the tables, in the BIOS area, which the memory map declares reserved.
pub(super) const TABLES: u64 = 0xe_0000;
const TABLES_END: u64 = 0x10_0000;
/// Length of every table's header in bytes (ACPI 6.5, 5.2.6).
const HEADER: u32 = 36;
const LOCAL_APIC: u32 = 0xfee0_0000;
const IO_APIC: u32 = 0xfec0_0000;
/// IAPC_BOOT_ARCH: no VGA, no CMOS clock. The bits for a keyboard controller and legacy devices are clear.
const NO_VGA_NO_CMOS: u16 = 1 << 2 | 1 << 5;

const OEM: [u8; 6] = *b"CUBE  ";
const TABLE: [u8; 8] = *b"CUBEVMM ";

/// Writes the tables. Returns the address of the first one (RSDP).
pub(super) fn write(ram: &Ram, vcpus: u8, devices: usize) -> Result<u64, HvmError> {
    let mut place = Place {
        ram,
        next: TABLES + 64,
    };
    let dsdt = place.put(&dsdt(devices)?)?;
    let fadt = place.put(&fadt(dsdt))?;
    let madt = place.put(&madt(vcpus))?;
    let mut xsdt = XSDT::new(OEM, TABLE, 1);
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    let xsdt = place.put(&xsdt)?;
    place.next = TABLES;
    place.put(&Rsdp::new(OEM, xsdt))
}

struct Place<'a> {
    ram: &'a Ram,
    next: u64,
}

impl Place<'_> {
    fn put(&mut self, table: &dyn Aml) -> Result<u64, HvmError> {
        let mut bytes = Vec::new();
        table.to_aml_bytes(&mut bytes);
        let at = self.next;
        self.next = (at + bytes.len() as u64).next_multiple_of(64);
        if self.next > TABLES_END {
            return Err(HvmError::Room("ACPI tables"));
        }
        self.ram
            .write_slice(&bytes, GuestAddress(at))
            .map_err(|_| HvmError::Room("ACPI tables"))?;
        Ok(at)
    }
}

fn madt(vcpus: u8) -> MADT {
    let mut madt = MADT::new(OEM, TABLE, 1, LocalInterruptController::Address(LOCAL_APIC));
    for id in 0..vcpus {
        madt.add_structure(ProcessorLocalApic::new(id, id, EnabledStatus::Enabled));
    }
    madt.add_structure(IoApic::new(0, IO_APIC, 0));
    madt
}

fn fadt(dsdt: u64) -> impl Aml {
    let port = |at: u16| {
        GAS::new(
            AddressSpace::SystemIo,
            8,
            0,
            AccessSize::ByteAccess,
            at.into(),
        )
    };
    let mut fadt = FADTBuilder::new(OEM, TABLE, 1)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::Headless);
    fadt.iapc_boot_arch = NO_VGA_NO_CMOS.into();
    fadt.reset_reg = port(ports::RESET);
    fadt.reset_value = ports::RESET_VALUE;
    fadt.sleep_control_reg = port(ports::SLEEP_CONTROL);
    fadt.sleep_status_reg = port(ports::SLEEP_STATUS);
    fadt.finalize()
}

/// The DSDT: one virtio-mmio device per slot, the serial port, and soft-off.
fn dsdt(devices: usize) -> Result<Sdt, HvmError> {
    let mut body = Vec::new();
    for slot in 0..u8::try_from(devices).unwrap_or(u8::MAX) {
        let base = REGISTERS + u64::from(slot) * SLOT_STRIDE;
        let base = u32::try_from(base).map_err(|_| HvmError::Room("device registers"))?;
        let bytes = u32::try_from(SLOT_STRIDE).unwrap_or(u32::MAX);
        let interrupt = DEVICE_GSI + u32::from(slot);
        device(
            &format!("_SB_.V{slot:03}"),
            &"LNRO0005",
            slot,
            &[
                &aml::Memory32Fixed::new(true, base, bytes),
                &aml::Interrupt::new(true, true, false, false, interrupt),
            ],
            &mut body,
        );
    }
    device(
        "_SB_.COM1",
        &aml::EISAName::new("PNP0501"),
        0,
        &[
            &aml::IO::new(ports::SERIAL, ports::SERIAL, 1, 8),
            &aml::Interrupt::new(true, true, false, false, SERIAL_GSI),
        ],
        &mut body,
    );
    let soft_off = aml::Package::new(vec![&ports::SOFT_OFF]);
    aml::Name::new("_S5_".into(), &soft_off).to_aml_bytes(&mut body);
    let mut table = Sdt::new(*b"DSDT", HEADER, 6, OEM, TABLE, 1);
    table.append_slice(&body);
    Ok(table)
}

fn device(path: &str, hid: &dyn Aml, uid: u8, resources: &[&dyn Aml], to: &mut Vec<u8>) {
    aml::Device::new(
        path.into(),
        vec![
            &aml::Name::new("_HID".into(), hid),
            &aml::Name::new("_UID".into(), &uid),
            &aml::Name::new(
                "_CRS".into(),
                &aml::ResourceTemplate::new(resources.to_vec()),
            ),
        ],
    )
    .to_aml_bytes(to);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_table_has_a_valid_checksum_and_is_reachable_from_the_rsdp() {
        let ram = Ram::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let rsdp = write(&ram, 8, 5).unwrap();
        let read = |at: u64, n: usize| {
            let mut bytes = vec![0; n];
            ram.read_slice(&mut bytes, GuestAddress(at)).unwrap();
            bytes
        };
        let u64_at = |b: &[u8], i: usize| u64::from_le_bytes(b[i..i + 8].try_into().unwrap());
        let table = |at: u64| {
            let length = u32::from_le_bytes(read(at + 4, 4).try_into().unwrap());
            let bytes = read(at, length as usize);
            assert_eq!(bytes.iter().fold(0_u8, |s, b| s.wrapping_add(*b)), 0);
            bytes
        };
        let root = read(rsdp, 36);
        assert!(root.starts_with(b"RSD PTR "));
        let xsdt = table(u64_at(&root, 24));
        let (fadt, madt) = (table(u64_at(&xsdt, 36)), table(u64_at(&xsdt, 44)));
        assert!(fadt.starts_with(b"FACP") && madt.starts_with(b"APIC"));
        assert_eq!(madt.len(), 44 + 8 * 8 + 12);
        let dsdt = table(u64_at(&fadt, 140));
        assert!(dsdt.starts_with(b"DSDT"));
        let text = String::from_utf8_lossy(&dsdt);
        assert_eq!(text.matches("LNRO0005").count(), 5);
    }
}
