//! Files that this node offers to others.

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Instant,
};

use cluster::NodeId;
use tasks::blocking;
use tokio::sync::{OnceCell, Semaphore};

use super::{FileList, Rate, Sums, TransferLimits, list::read_chunk};

/// Concurrent reads of chunks, for all nodes together.
const READS: usize = 4;

/// All files that are offered. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Offers(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    offers: Mutex<BTreeMap<String, Arc<Offer>>>,
    reads: Semaphore,
    rate: Rate,
    sums: Sums,
}

/// The nodes that may fetch the files of an offer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Takers {
    Members,
    Only(NodeId),
}

#[derive(Debug)]
struct Offer {
    takers: Takers,
    /// Open files, so that they can be read to the end even if they are removed.
    files: Vec<(String, File)>,
    list: OnceCell<FileList>,
    /// When the offer was made or last used.
    used: Mutex<Instant>,
}

/// Keeps files on offer until dropped.
#[derive(Debug)]
pub(crate) struct Offered {
    key: String,
    offer: Weak<Offer>,
    offers: Offers,
}

impl Offers {
    pub(crate) fn new(limits: TransferLimits) -> Self {
        Self(Arc::new(Inner {
            offers: Mutex::default(),
            reads: Semaphore::new(READS),
            rate: Rate::new(limits.rate),
            sums: Sums::default(),
        }))
    }

    /// Cached hashes of this node's immutable files.
    pub(crate) fn sums(&self) -> &Sums {
        &self.0.sums
    }

    /// Offers files, which must not change, under a key of letters, digits and `-`. Replaces an existing offer with
    /// this key.
    pub(crate) fn offer(&self, key: &str, takers: Takers, files: Vec<(String, File)>) -> Offered {
        let offer = Arc::new(Offer {
            takers,
            files,
            list: OnceCell::new(),
            used: Mutex::new(Instant::now()),
        });
        let offered = Offered {
            key: key.to_owned(),
            offer: Arc::downgrade(&offer),
            offers: self.clone(),
        };
        self.lock().insert(key.to_owned(), offer);
        offered
    }

    /// The files of an offer with their hashes, which are computed on first use. `None` if there is no such offer for
    /// the member `by`.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read, or if the files exceed the limits of a list.
    pub(crate) async fn list(&self, key: &str, by: &NodeId) -> io::Result<Option<FileList>> {
        let Some(offer) = self.get(key, by) else {
            return Ok(None);
        };
        let sum = || {
            let (offer, sums) = (Arc::clone(&offer), self.0.sums.clone());
            blocking(move || offer.sum(&sums))
        };
        offer.list.get_or_try_init(sum).await.cloned().map(Some)
    }

    /// A chunk of an offered file. `None` if nothing is offered to the member `by` under this name.
    ///
    /// # Errors
    /// Returns an error if it cannot be read.
    pub(crate) async fn chunk(
        &self,
        key: &str,
        by: &NodeId,
        name: &str,
        chunk: usize,
    ) -> io::Result<Option<Vec<u8>>> {
        let _turn = self.0.reads.acquire().await.map_err(io::Error::other)?;
        let Some((offer, list)) = self.get(key, by).zip(self.list(key, by).await?) else {
            return Ok(None);
        };
        let found = list.get(name).filter(|file| chunk < file.chunks.len());
        let Some((begin, len)) = found.map(|file| file.range(chunk)) else {
            return Ok(None);
        };
        self.0.rate.take(len as u64).await;
        let name = name.to_owned();
        let read = blocking(move || {
            let file = offer.files.iter().find(|(other, _)| *other == name);
            file.map(|(_, file)| read_chunk(file, begin, len))
                .transpose()
        });
        read.await
    }

    /// The offer, if the member `by` may use it. Marks it as used.
    fn get(&self, key: &str, by: &NodeId) -> Option<Arc<Offer>> {
        let offer = self.lock().get(key).cloned()?;
        match &offer.takers {
            Takers::Members => {}
            Takers::Only(taker) if taker == by => {}
            Takers::Only(_) => return None,
        }
        offer.renew();
        Some(offer)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Offer>>> {
        self.0.offers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Offer {
    fn renew(&self) {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    fn sum(&self, sums: &Sums) -> io::Result<FileList> {
        let sums = self.files.iter().map(|(name, file)| sums.of(name, file));
        let sums: Vec<_> = sums.collect::<io::Result<_>>()?;
        FileList::try_from(sums).map_err(io::Error::other)
    }
}

impl Offered {
    /// When the offer was made or last used by another node. `None` if another offer has replaced it.
    pub(crate) fn used(&self) -> Option<Instant> {
        let offer = self.offer.upgrade()?;
        let used = offer.used.lock();
        Some(*used.unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn renew(&self) {
        if let Some(offer) = self.offer.upgrade() {
            offer.renew();
        }
    }

    #[must_use]
    pub(crate) fn key(&self) -> &str {
        &self.key
    }
}

impl Drop for Offered {
    fn drop(&mut self) {
        let mut offers = self.offers.lock();
        let is_this = |offer: &Arc<Offer>| std::ptr::eq(Arc::as_ptr(offer), self.offer.as_ptr());
        if offers.get(&self.key).is_some_and(is_this) {
            offers.remove(&self.key);
        }
    }
}
