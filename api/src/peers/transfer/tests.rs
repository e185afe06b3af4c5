use std::{
    os::unix::fs::{FileExt, MetadataExt},
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use std::fs::{self, File};

use axum::body::Bytes as Body;
use hyper::StatusCode;
use model::Bytes;
use serde_json::{Value, json};

use super::{fetch::Source, *};

const LIMITS: TransferLimits = TransferLimits {
    rate: Bytes(u64::MAX),
    disk_reserve: Bytes(0),
};

/// A node that serves offers in this process, and misbehaves on request.
#[derive(Clone)]
struct Fake {
    node: NodeId,
    offers: Offers,
    /// Number of chunks that are still sent.
    left: Arc<AtomicUsize>,
    asked: Arc<Mutex<Vec<String>>>,
    is_corrupt: bool,
}

impl Fake {
    fn of(offers: &Offers) -> Self {
        Self {
            node: "a".parse().unwrap(),
            offers: offers.clone(),
            left: Arc::new(AtomicUsize::new(usize::MAX)),
            asked: Arc::default(),
            is_corrupt: false,
        }
    }

    fn count(&self) -> usize {
        self.asked.lock().unwrap().len()
    }
}

impl Source for Fake {
    fn node(&self) -> &NodeId {
        &self.node
    }

    async fn get(&self, path: String, most: usize) -> Result<(StatusCode, Body), PeerError> {
        if self.left.fetch_sub(1, Ordering::SeqCst) == 0 {
            let (node, limit_s) = (self.node.clone(), 1);
            self.left.store(0, Ordering::SeqCst);
            return Err(PeerError::Late { node, limit_s });
        }
        self.asked.lock().unwrap().push(path.clone());
        let parts: Vec<_> = path.split('/').skip(3).collect();
        let chunk = parts[2].parse().unwrap();
        let by = by();
        let found = self.offers.chunk(parts[0], &by, parts[1], chunk);
        let found = found.await.unwrap();
        let Some(mut bytes) = found else {
            return Ok((StatusCode::NOT_FOUND, Body::new()));
        };
        assert!(bytes.len() <= most);
        if self.is_corrupt {
            bytes[0] ^= 1;
        }
        Ok((StatusCode::OK, bytes.into()))
    }
}

/// The requesting node.
fn by() -> NodeId {
    "b".parse().unwrap()
}

const CHUNKS: u64 = 6;

/// A file with a chunk of zeros, a hole, and a last chunk that is short.
fn file(dir: &Path, salt: u8) -> File {
    let path = dir.join(format!("file{salt}"));
    let file = File::create_new(&path).unwrap();
    for chunk in [0, 1, 3, 5] {
        let byte = u8::try_from(chunk).unwrap() + salt;
        let len = if chunk == 5 { 10 } else { CHUNK };
        let bytes = vec![byte; usize::try_from(len).unwrap()];
        file.write_all_at(&bytes, chunk * CHUNK).unwrap();
    }
    let zeros = vec![0; usize::try_from(CHUNK).unwrap()];
    file.write_all_at(&zeros, 2 * CHUNK).unwrap();
    assert_eq!(file.metadata().unwrap().len().div_ceil(CHUNK), CHUNKS);
    File::open(path).unwrap()
}

async fn fetch(from: &Fake, list: &FileList, dir: &Path) -> Result<u64, TransferError> {
    let fetch = Fetch {
        key: "k",
        list,
        dir,
    };
    fetch.run(from, &Rate::new(LIMITS.rate), LIMITS).await
}

#[tokio::test]
async fn a_fetch_goes_on_after_a_break_and_holes_are_not_sent() {
    let dir = tempfile::tempdir().unwrap();
    let offers = Offers::new(LIMITS);
    let offered = offers.offer(
        "k",
        Takers::Members,
        vec![("layer".to_owned(), file(dir.path(), 1))],
    );
    let list = offers.list("k", &by()).await.unwrap().unwrap();
    let from = Fake::of(&offers);
    from.left.store(2, Ordering::SeqCst);
    let to = dir.path().join("to");
    let broken = fetch(&from, &list, &to).await.unwrap_err();
    assert!(matches!(broken, TransferError::Peer(_)), "{broken}");
    assert!(!to.join("layer").exists() && to.join("layer.part").exists());
    from.left.store(usize::MAX, Ordering::SeqCst);
    fetch(&from, &list, &to).await.unwrap();
    let asked = from.asked.lock().unwrap().clone();
    assert_eq!(asked.len(), 4, "each chunk with data once: {asked:?}");
    let (made, given) = (to.join("layer"), dir.path().join("file1"));
    assert_eq!(fs::read(&made).unwrap(), fs::read(given).unwrap());
    assert!(fs::metadata(&made).unwrap().blocks() * 512 < 4 * CHUNK);
    // Complete files are compared and kept.
    assert_eq!(fetch(&from, &list, &to).await.unwrap(), 0);
    assert_eq!(from.count(), 4);
    // Different content under the same name replaces it, including its zeros.
    drop(offered);
    let gone = Fake::of(&offers);
    let _other = offers.offer(
        "k",
        Takers::Members,
        vec![("layer".to_owned(), file(dir.path(), 9))],
    );
    let other = offers.list("k", &by()).await.unwrap().unwrap();
    assert_ne!(other.files()[0].content(), list.files()[0].content());
    fetch(&gone, &other, &to).await.unwrap();
    assert_eq!(
        fs::read(&made).unwrap(),
        fs::read(dir.path().join("file9")).unwrap()
    );
}

#[tokio::test]
async fn only_the_taker_of_an_offer_gets_its_files() {
    let dir = tempfile::tempdir().unwrap();
    let offers = Offers::new(LIMITS);
    let files = vec![("layer".to_owned(), file(dir.path(), 1))];
    let _offered = offers.offer("k", Takers::Only(by()), files);
    let other: NodeId = "c".parse().unwrap();
    for (node, expected) in [(by(), true), (other, false)] {
        let list = offers.list("k", &node).await.unwrap();
        let chunk = offers.chunk("k", &node, "layer", 0).await.unwrap();
        assert_eq!(
            (list.is_some(), chunk.is_some()),
            (expected, expected),
            "{node}"
        );
    }
}

#[tokio::test]
async fn a_chunk_with_another_content_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let offers = Offers::new(LIMITS);
    let offered = offers.offer(
        "k",
        Takers::Members,
        vec![("layer".to_owned(), file(dir.path(), 1))],
    );
    let list = offers.list("k", &by()).await.unwrap().unwrap();
    let mut from = Fake::of(&offers);
    from.is_corrupt = true;
    let to = dir.path().join("to");
    let wrong = fetch(&from, &list, &to).await.unwrap_err();
    assert!(matches!(wrong, TransferError::Corrupt { .. }), "{wrong}");
    let part = File::open(to.join("layer.part")).unwrap();
    assert_eq!(part.metadata().unwrap().blocks(), 0, "nothing was kept");
    from.is_corrupt = false;
    drop(offered);
    let gone = fetch(&from, &list, &to).await.unwrap_err();
    assert!(matches!(gone, TransferError::NotOffered { .. }), "{gone}");
}

#[tokio::test]
async fn what_was_damaged_on_disk_is_fetched_again() {
    let dir = tempfile::tempdir().unwrap();
    let offers = Offers::new(LIMITS);
    let _offered = offers.offer(
        "k",
        Takers::Members,
        vec![("layer".to_owned(), file(dir.path(), 1))],
    );
    let list = offers.list("k", &by()).await.unwrap().unwrap();
    let from = Fake::of(&offers);
    let to = dir.path().join("to");
    fetch(&from, &list, &to).await.unwrap();
    for (at, again) in [(CHUNK, 1), (4 * CHUNK, 4)] {
        let options = File::options().write(true).open(to.join("layer")).unwrap();
        options.write_all_at(b"?", at).unwrap();
        let before = from.count();
        fetch(&from, &list, &to).await.unwrap();
        assert_eq!(from.count() - before, again, "damage at {at}");
        let given = fs::read(dir.path().join("file1")).unwrap();
        assert_eq!(fs::read(to.join("layer")).unwrap(), given);
    }
}

#[tokio::test]
async fn the_reserve_of_the_disk_stays_free() {
    let dir = tempfile::tempdir().unwrap();
    let offers = Offers::new(LIMITS);
    let _offered = offers.offer(
        "k",
        Takers::Members,
        vec![("layer".to_owned(), file(dir.path(), 1))],
    );
    let list = offers.list("k", &by()).await.unwrap().unwrap();
    let limits = TransferLimits {
        disk_reserve: Bytes(u64::MAX),
        ..LIMITS
    };
    let fetch = Fetch {
        key: "k",
        list: &list,
        dir: &dir.path().join("to"),
    };
    let full = fetch
        .run(&Fake::of(&offers), &Rate::new(LIMITS.rate), limits)
        .await;
    assert!(matches!(full, Err(TransferError::NoSpace { .. })));
}

#[test]
fn a_malformed_list_is_refused() {
    let sum = "00".repeat(32);
    let entry =
        |name: &str, bytes: u64, sums: &str| json!({"name": name, "bytes": bytes, "sums": sums});
    let good = entry("root-1.img", CHUNK + 1, &sum.repeat(2));
    let read = |list: Value| serde_json::from_value::<FileList>(list);
    let list = read(json!([good, entry("b", 0, "")])).unwrap();
    assert_eq!(read(serde_json::to_value(&list).unwrap()).unwrap(), list);
    for (name, bytes, sums) in [
        ("", 1, sum.clone()),
        ("..", 1, sum.clone()),
        ("a/b", 1, sum.clone()),
        ("a.part", 1, sum.clone()),
        (&*"a".repeat(65), 1, sum.clone()),
        ("a", CHUNK + 1, sum.clone()),
        ("a", 0, sum.clone()),
        ("a", 1, sum[1..].to_owned()),
        ("a", 1, "x".repeat(64)),
        ("a", u64::MAX, sum.clone()),
    ] {
        assert!(
            read(json!([entry(name, bytes, &sums)])).is_err(),
            "{name} {bytes}"
        );
    }
    assert!(read(json!([good, good])).is_err());
    let many: Vec<_> = (0..65).map(|n| entry(&format!("f{n}"), 0, "")).collect();
    assert!(read(json!(many)).is_err());
}

#[tokio::test]
async fn transfers_together_keep_to_the_rate() {
    let (rate, began) = (Rate::new(Bytes::mib(40)), std::time::Instant::now());
    for _ in 0..5 {
        rate.take(1 << 20).await;
    }
    assert!(began.elapsed() >= std::time::Duration::from_millis(100));
}
