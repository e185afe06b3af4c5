//! Disk space of the state directory that is set aside for files which jobs write. The driver and its jobs share the
//! account, because some jobs find out only on their thread that they have to write a file.

use std::{
    io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::host;

/// A handle. Clones share the account.
#[derive(Clone, Debug, Default)]
pub struct Account(Arc<Totals>);

#[derive(Debug, Default)]
struct Totals {
    /// Bytes of all [`SetAside`].
    aside: AtomicU64,
    /// Bytes that sandboxes and their saves may yet write, as last published by the driver.
    promised: AtomicU64,
}

/// The space that a job may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allowance {
    /// Free space beyond this reserve in bytes, and beyond what is set aside and promised.
    Beyond(u64),
    /// All free space: resumes are never refused for the sake of others.
    All,
}

/// Space that is set aside until this value is dropped.
#[derive(Debug)]
pub struct SetAside {
    account: Account,
    bytes: u64,
}

impl Account {
    /// Bytes that are set aside.
    pub fn aside(&self) -> u64 {
        self.0.aside.load(Ordering::SeqCst)
    }

    pub fn publish(&self, promised: u64) {
        self.0.promised.store(promised, Ordering::SeqCst);
    }

    /// Sets space aside. `check` gets the bytes that are already set aside. It may be called several times, if others
    /// take space concurrently.
    ///
    /// # Errors
    /// Returns the error of `check`.
    pub fn take<E>(&self, bytes: u64, check: impl Fn(u64) -> Result<(), E>) -> Result<SetAside, E> {
        let aside = &self.0.aside;
        let mut before = self.aside();
        loop {
            check(before)?;
            let after = before.saturating_add(bytes);
            match aside.compare_exchange(before, after, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => break,
                Err(present) => before = present,
            }
        }
        Ok(SetAside {
            account: self.clone(),
            bytes,
        })
    }

    /// Sets space aside on the disk of `dir`.
    ///
    /// # Errors
    /// Returns [`io::ErrorKind::StorageFull`] if the allowance does not suffice.
    pub(crate) fn take_on(
        &self,
        dir: &Path,
        bytes: u64,
        allowance: Allowance,
    ) -> io::Result<SetAside> {
        self.take(bytes, |aside| {
            let kept = match allowance {
                Allowance::All => 0,
                Allowance::Beyond(reserve) => {
                    let promised = self.0.promised.load(Ordering::SeqCst);
                    reserve.saturating_add(promised).saturating_add(aside)
                }
            };
            let free = host::disk_free(dir).unwrap_or(u64::MAX);
            if bytes.saturating_add(kept) <= free {
                return Ok(());
            }
            Err(io::Error::new(
                io::ErrorKind::StorageFull,
                format!(
                    "{bytes} bytes are needed in addition to {kept} that are reserved, promised or set aside, but only {free} are free"
                ),
            ))
        })
    }
}

impl Drop for SetAside {
    fn drop(&mut self) {
        self.account.0.aside.fetch_sub(self.bytes, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;
    use crate::error::is_full;

    #[test]
    fn several_that_take_space_at_once_never_have_more_than_there_is() {
        let account = Account::default();
        let all = Barrier::new(8);
        let taken: usize = std::thread::scope(|scope| {
            let take = || {
                all.wait();
                let taken = account.take(30, |aside| (aside + 30 <= 100).then_some(()).ok_or(()));
                // All threads try before any space is returned.
                all.wait();
                usize::from(taken.is_ok())
            };
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(take)).collect();
            threads.into_iter().map(|t| t.join().unwrap()).sum()
        });
        assert_eq!((taken, account.aside()), (3, 0));
    }

    #[test]
    fn a_job_leaves_the_reserve_what_is_promised_and_what_is_set_aside() {
        let dir = tempfile::tempdir().unwrap();
        let account = Account::default();
        let take = |bytes, allowance| account.take_on(dir.path(), bytes, allowance);
        let held = take(1, Allowance::Beyond(0)).unwrap();
        assert_eq!(account.aside(), 1);
        let large = u64::MAX / 2;
        assert!(is_full(&take(1, Allowance::Beyond(large)).unwrap_err()));
        assert!(is_full(&take(large, Allowance::All).unwrap_err()));
        account.publish(large);
        assert!(is_full(&take(1, Allowance::Beyond(0)).unwrap_err()));
        drop(take(1, Allowance::All).unwrap());
        account.publish(0);
        let others = account.take(large, |_| Ok::<_, ()>(())).unwrap();
        assert!(is_full(&take(1, Allowance::Beyond(0)).unwrap_err()));
        drop((held, others));
        assert_eq!(account.aside(), 0);
        take(1, Allowance::Beyond(0)).unwrap();
    }
}
