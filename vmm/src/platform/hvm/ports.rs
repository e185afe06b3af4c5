//! The I/O ports of a legacy-free PC: a serial port for the console, and ACPI's registers for power-off and reset. All
//! vCPUs share them behind a lock.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvm_ioctls::VmFd;
use serde::{Deserialize, Serialize};
use vm_superio::{
    Serial, Trigger,
    serial::{NoEvents, SerialState},
};

use super::{error::HvmError, map::SERIAL_GSI};
use crate::platform::EndReason;

/// First of the eight ports of the serial port.
pub(super) const SERIAL: u16 = 0x3f8;
const SERIAL_END: u16 = SERIAL + 7;
/// ACPI's sleep control and status registers (ACPI 6.5, 4.8.3.7), and its reset register.
pub(super) const SLEEP_CONTROL: u16 = 0x600;
pub(super) const SLEEP_STATUS: u16 = 0x601;
pub(super) const RESET: u16 = 0x602;
/// Values for these ports, as the ACPI tables specify them.
pub(super) const SOFT_OFF: u8 = 5;
pub(super) const RESET_VALUE: u8 = 1;
/// SLP_EN with SLP_TYPx of soft-off.
const POWER_OFF: u8 = 1 << 5 | SOFT_OFF << 2;
/// Data port of the CMOS. It reads as zero ("no update in progress"); on all ones the kernel would wait.
const CMOS_DATA: u16 = 0x71;
/// Limit on buffered console output in bytes. Further output is dropped until the machine's thread fetches it.
const MAX_LOG: usize = 64 << 10;

/// The effect of a write on the machine.
pub(super) enum Outcome {
    Nothing,
    /// The console output has a complete line.
    Line,
    Ended(EndReason),
}

/// The serial port in a snapshot.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct SerialLine {
    divisor: [u8; 2],
    interrupt_enable: u8,
    interrupt_identification: u8,
    line: [u8; 2],
    modem: [u8; 2],
    scratch: u8,
}

#[derive(Debug)]
struct Interrupt(Arc<VmFd>);

impl Trigger for Interrupt {
    type E = kvm_ioctls::Error;

    fn trigger(&self) -> Result<(), Self::E> {
        pulse(&self.0, SERIAL_GSI)
    }
}

pub(super) type SharedPorts = Arc<Mutex<Ports>>;

/// Locks the ports. A panic under the lock can only leave incomplete console output behind.
pub(super) fn lock(ports: &SharedPorts) -> MutexGuard<'_, Ports> {
    ports.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) struct Ports {
    vm: Arc<VmFd>,
    serial: Serial<Interrupt, NoEvents, Vec<u8>>,
}

impl std::fmt::Debug for Ports {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ports").finish_non_exhaustive()
    }
}

impl Ports {
    pub(super) fn shared(vm: &Arc<VmFd>) -> SharedPorts {
        Arc::new(Mutex::new(Self {
            vm: Arc::clone(vm),
            serial: Serial::new(Interrupt(Arc::clone(vm)), Vec::new()),
        }))
    }

    pub(super) fn read(&mut self, port: u16, data: &mut [u8]) {
        match port {
            SERIAL..=SERIAL_END => {
                let offset = serial_offset(port);
                data.fill_with(|| self.serial.read(offset));
            }
            CMOS_DATA | SLEEP_STATUS => data.fill(0),
            _ => data.fill(0xff),
        }
    }

    pub(super) fn write(&mut self, port: u16, data: &[u8]) -> Outcome {
        match (port, data) {
            (SERIAL..=SERIAL_END, _) => self.print(serial_offset(port), data),
            (SLEEP_CONTROL, [POWER_OFF, ..]) => Outcome::Ended(EndReason::PowerOff),
            (RESET, [RESET_VALUE, ..]) => Outcome::Ended(EndReason::Reboot),
            _ => Outcome::Nothing,
        }
    }

    fn print(&mut self, offset: u8, data: &[u8]) -> Outcome {
        let before = self.serial.writer().len();
        for byte in data {
            // The only possible error is that KVM refuses the interrupt. The driver then polls.
            let _ = self.serial.write(offset, *byte);
        }
        let log = self.serial.writer_mut();
        let line = log[before.min(log.len())..].contains(&b'\n');
        log.truncate(MAX_LOG);
        if line {
            Outcome::Line
        } else {
            Outcome::Nothing
        }
    }

    pub(super) fn take_log(&mut self) -> Vec<u8> {
        std::mem::take(self.serial.writer_mut())
    }

    pub(super) fn line(&self) -> SerialLine {
        let s = self.serial.state();
        SerialLine {
            divisor: [s.baud_divisor_low, s.baud_divisor_high],
            interrupt_enable: s.interrupt_enable,
            interrupt_identification: s.interrupt_identification,
            line: [s.line_control, s.line_status],
            modem: [s.modem_control, s.modem_status],
            scratch: s.scratch,
        }
    }

    pub(super) fn restore(&mut self, saved: &SerialLine) -> Result<(), HvmError> {
        let state = SerialState {
            baud_divisor_low: saved.divisor[0],
            baud_divisor_high: saved.divisor[1],
            interrupt_enable: saved.interrupt_enable,
            interrupt_identification: saved.interrupt_identification,
            line_control: saved.line[0],
            line_status: saved.line[1],
            modem_control: saved.modem[0],
            modem_status: saved.modem[1],
            scratch: saved.scratch,
            in_buffer: Vec::new(),
        };
        let interrupt = Interrupt(Arc::clone(&self.vm));
        self.serial = Serial::from_state(&state, interrupt, NoEvents, Vec::new())
            .map_err(|_| HvmError::State("serial line"))?;
        Ok(())
    }
}

/// Raises and lowers an interrupt line.
pub(super) fn pulse(vm: &VmFd, gsi: u32) -> Result<(), kvm_ioctls::Error> {
    vm.set_irq_line(gsi, true)?;
    vm.set_irq_line(gsi, false)
}

fn serial_offset(port: u16) -> u8 {
    u8::try_from(port - SERIAL).unwrap_or(0)
}
