use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Read, Write},
    net::TcpListener,
};

use netisolation::{Destinations, ForbiddenAddresses};
use pool::{ChangeKind, Lifetime, SandboxState, TemplateInfo, TemplateKind};
use rest::{DeliveryError, EventData};

use super::{deliver::Pauses, *};

struct Fixed(u32);

impl Names for Fixed {
    fn template(&self, pool_id: &str) -> (String, String) {
        (pool_id.to_owned(), format!("build-of-{pool_id}"))
    }

    fn execution(&mut self) -> String {
        self.0 += 1;
        format!("execution-{}", self.0)
    }
}

fn id(seed: u8) -> SandboxId {
    SandboxId::from_random([seed; 19])
}

fn sandbox(seed: u8, state: SandboxState) -> pool::Sandbox {
    let mut note = crate::registry::note::tests::note(1000);
    note.metadata.insert("user".into(), "ann".into());
    let template = TemplateInfo {
        id: "t".into(),
        names: vec!["base".into()],
        memory: model::Bytes::mib(512),
        vcpus: 1,
        disk: model::Bytes(0),
        created_unix_s: 0,
        kind: TemplateKind::Installed,
        source: None,
        spawned: 0,
        warm: 0,
        vmm: None,
        bytes: model::Bytes(0),
    };
    let lifetime = Lifetime {
        end_at: 9000,
        ..Lifetime::default()
    };
    pool::Sandbox {
        id: id(seed),
        template: Arc::new(template),
        state,
        lifetime,
        note: note.to_text().unwrap().into(),
        vsock: PathBuf::new(),
        console: PathBuf::new(),
        pid: 1,
        timeline: model::Timeline::default(),
        warm: false,
        generation: 1,
        vm_since: 0,
        claim: None,
    }
}

const PAUSED: SandboxState = SandboxState::Paused(pool::PauseMode::Memory);

fn kinds(happened: &[Happened]) -> Vec<Kind> {
    happened.iter().map(|h| h.kind).collect()
}

#[test]
fn the_changes_of_a_life_become_events_with_their_executions() {
    let (mut ledger, mut names) = (Ledger::default(), Fixed(0));
    let running = sandbox(1, SandboxState::Running);
    let mut change = |at, kind: ChangeKind| {
        let view = (!matches!(kind, ChangeKind::Ended(_))).then_some(&running);
        ledger.change(&id(1), at, &kind, view, &mut names)
    };
    let created = change(1000, ChangeKind::Created).unwrap();
    assert_eq!(created.data.sandbox_metadata["user"], "ann");
    assert_eq!(
        created.data.set_timeout,
        Some(Timestamp::from_unix_ms(9000))
    );
    assert_eq!(
        (
            created.alive.template.as_str(),
            created.alive.build.as_str()
        ),
        ("t", "build-of-t")
    );
    let updated = change(1100, ChangeKind::Updated).unwrap();
    assert_eq!(updated.alive.execution, "execution-1");
    let paused = change(1500, ChangeKind::Paused)
        .unwrap()
        .data
        .execution
        .unwrap();
    assert_eq!(
        (paused.execution_time, paused.memory_mb, paused.vcpu_count),
        (500, 512, 1)
    );
    let resumed = change(2000, ChangeKind::Resumed).unwrap();
    assert_eq!(resumed.alive.execution, "execution-2");
    assert!(change(2100, ChangeKind::Snapshotted).is_some());
    let killed = change(2250, ChangeKind::Ended(Some("lost".into()))).unwrap();
    assert_eq!(killed.data.execution.unwrap().execution_time, 250);
    assert_eq!(killed.data.reason.as_deref(), Some("lost"));
    assert_eq!(change(2300, ChangeKind::Ended(None)), None, "only once");
}

#[test]
fn a_new_server_logs_what_a_killed_one_could_not() {
    let (mut ledger, mut names) = (Ledger::default(), Fixed(0));
    let now = |ledger: &mut Ledger, list: &[pool::Sandbox], names: &mut Fixed| {
        kinds(&ledger.reconcile(5000, list, &[], names))
    };
    let (one, two) = (sandbox(1, SandboxState::Running), sandbox(2, PAUSED));
    let found = now(&mut ledger, &[one.clone(), two.clone()], &mut names);
    assert_eq!(found, [Kind::Created, Kind::Created, Kind::Paused]);
    assert_eq!(now(&mut ledger, &[one.clone(), two], &mut names), []);
    let two = sandbox(2, SandboxState::Running);
    assert_eq!(now(&mut ledger, &[one, two], &mut names), [Kind::Resumed]);
    assert_eq!(
        now(&mut ledger, &[], &mut names),
        [Kind::Killed, Kind::Killed]
    );
    // Created and lost before the log recorded it, so nothing else reports it.
    let lost = [(id(4), "its VMM was killed".to_owned())];
    let told = ledger.reconcile(
        5000,
        &[sandbox(4, SandboxState::Running)],
        &lost,
        &mut names,
    );
    assert_eq!(kinds(&told), [Kind::Created, Kind::Killed]);
    assert_eq!(told[1].data.reason.as_deref(), Some("its VMM was killed"));
    assert!(ledger.alive.is_empty());
    let mut of_build = sandbox(3, SandboxState::Running);
    of_build.note = builds::machine::NOTE.into();
    assert_eq!(now(&mut ledger, &[of_build], &mut names), []);
}

fn entry(number: u64, seed: u8, kind: Kind) -> Entry {
    let (mut ledger, mut names) = (Ledger::default(), Fixed(0));
    let running = sandbox(seed, SandboxState::Running);
    let happened = ledger.change(
        &id(seed),
        1000,
        &ChangeKind::Created,
        Some(&running),
        &mut names,
    );
    Entry {
        number,
        event: LifecycleEvent {
            version: "v1".into(),
            id: uuid(&format!("{number:032x}")),
            kind: kind.name().into(),
            event_data: EventData::default(),
            sandbox_id: id(seed).to_string(),
            sandbox_execution_id: String::new(),
            sandbox_template_id: String::new(),
            sandbox_build_id: String::new(),
            sandbox_team_id: String::new(),
            timestamp: Timestamp::from_unix_ms(now()),
        },
        alive: (kind != Kind::Killed).then(|| happened.unwrap().alive),
    }
}

#[test]
fn the_log_goes_on_after_a_crash_within_a_line_and_lists_what_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let (mut log, past) = Log::open(dir.path(), 10).unwrap();
    assert!(past.alive.is_empty() && past.latest.is_empty());
    for (number, seed, kind) in [
        (1, 1, Kind::Created),
        (2, 2, Kind::Created),
        (3, 1, Kind::NetworkRefused),
        (4, 1, Kind::Killed),
    ] {
        assert_eq!(log.next(), number);
        log.append(&entry(number, seed, kind)).unwrap();
    }
    drop(log);
    let segment = dir.path().join(format!("{:020}.jsonl", 1));
    let mut torn = std::fs::read(&segment).unwrap();
    torn.extend_from_slice(br#"{"number":5,"ev"#);
    std::fs::write(&segment, torn).unwrap();
    let (mut log, past) = Log::open(dir.path(), 3).unwrap();
    assert_eq!(
        past.alive.keys().cloned().collect::<Vec<_>>(),
        [id(2).to_string()]
    );
    let latest: Vec<_> = past.latest.iter().map(|e| e.number).collect();
    assert_eq!((latest, log.next()), (vec![2, 3, 4], 5));
    log.append(&entry(5, 2, Kind::Paused)).unwrap();
    let list = |sandbox: Option<&str>, kinds: &[&str], offset, limit, is_ascending| {
        let kinds: Vec<_> = kinds.iter().map(|k| (*k).to_owned()).collect();
        let listing = Listing {
            sandbox,
            kinds: &kinds,
            offset,
            limit,
            is_ascending,
            since_ns: 0,
        };
        let found = log::list(dir.path(), &listing).unwrap();
        found
            .iter()
            .map(|e| u64::from_str_radix(&e.id[24..], 16).unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        list(None, &[], 0, 10, false),
        [5, 4, 2, 1],
        "without types of our own"
    );
    assert_eq!(list(None, &[], 1, 2, true), [2, 4]);
    assert_eq!(list(Some(&id(1).to_string()), &[], 0, 10, true), [1, 4]);
    assert_eq!(list(None, &["sandbox.network.refused"], 0, 10, true), [3]);
}

#[test]
fn a_full_file_is_followed_by_one_that_is_enough_to_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let (mut log, _) = Log::open(dir.path(), 1).unwrap();
    let before = entry(1, 9, Kind::Created).alive.unwrap();
    let before = BTreeMap::from([(id(9).to_string(), before)]);
    let files = || std::fs::read_dir(dir.path()).unwrap().count();
    while files() == 1 {
        assert!(log.next() < 100_000, "no second file");
        for _ in 0..1000 {
            log.roll(&before).unwrap();
            log.append(&entry(log.next(), 1, Kind::Created)).unwrap();
        }
    }
    let next = log.next();
    drop(log);
    std::fs::remove_file(dir.path().join(format!("{:020}.jsonl", 1))).unwrap();
    let (log, past) = Log::open(dir.path(), 1).unwrap();
    assert_eq!(log.next(), next);
    let alive: Vec<_> = past.alive.keys().cloned().collect();
    assert_eq!(alive, [id(1).to_string(), id(9).to_string()]);
}

/// A handle without an owner, with these entries in its ring.
fn events(dir: &Path, entries: Vec<Entry>) -> Events {
    let (events, opened) = Events::open(dir, "team").unwrap();
    drop(opened);
    let latest = entries.last().map_or(0, |e| e.number);
    events.ring().extend(entries.into_iter().map(Arc::new));
    events.0.latest.store(latest, Ordering::Release);
    events
}

fn hook(url: &str, kinds: &[Kind]) -> NewWebhook {
    NewWebhook {
        name: "n".into(),
        url: url.into(),
        enabled: None,
        events: kinds.iter().map(|k| k.name().to_owned()).collect(),
        signature_secret: "secret".into(),
    }
}

/// Reads a request, responds with a status, and returns head and body.
fn receive(listener: &TcpListener, status: &str) -> (String, Vec<u8>) {
    let (mut stream, _) = listener.accept().unwrap();
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let (mut head, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        if let Some(text) = line.strip_prefix("Content-Length: ") {
            length = text.trim().parse().unwrap();
        }
        if line == "\r\n" {
            break;
        }
        head.push_str(&line);
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    write!(stream, "HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n").unwrap();
    (head, body)
}

fn field<'a>(head: &'a str, name: &str) -> &'a str {
    let mut fields = head.lines().filter_map(|line| line.split_once(": "));
    fields.find(|(found, _)| *found == name).unwrap().1
}

fn loopback() -> ForbiddenAddresses {
    ForbiddenAddresses::new(vec![loopback_block()], Vec::new())
}

fn loopback_block() -> Destinations {
    Destinations {
        block: "127.0.0.0/8".parse().unwrap(),
        access: Vec::new(),
    }
}

#[tokio::test]
async fn a_delivery_is_signed_in_both_ways_and_repeated_with_its_id_until_it_succeeds() {
    let dir = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/hook", listener.local_addr().unwrap());
    let events = events(dir.path(), Vec::new());
    let made = events.create(hook(&url, &[Kind::Created])).unwrap();
    let entries = [entry(1, 1, Kind::Killed), entry(2, 2, Kind::Created)];
    events.ring().extend(entries.into_iter().map(Arc::new));
    events.0.latest.store(2, Ordering::Release);
    let pauses = Pauses(vec![Duration::ZERO; 2]);
    let running = tokio::spawn(deliver::run(events.clone(), loopback(), pauses));
    let received = tokio::task::spawn_blocking(move || {
        let redirect = "302 Found\r\nLocation: http://127.0.0.1:1/";
        [redirect, "500 No", "204 No Content"].map(|status| receive(&listener, status))
    });
    let received = received.await.unwrap();
    let ids: Vec<_> = received
        .iter()
        .map(|(head, _)| field(head, "e2b-delivery-id"))
        .collect();
    assert!(ids[0] == ids[1] && ids[1] == ids[2], "{ids:?}");
    let (head, body) = &received[2];
    assert_eq!(field(head, "e2b-webhook-id"), made.id);
    // Verified as in E2B's documentation, with another implementation of the parts.
    let mut hash = ring::digest::Context::new(&ring::digest::SHA256);
    hash.update(b"secret");
    hash.update(body);
    let plain = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, hash.finish());
    let expected = plain.replace('+', "-").replace('/', "_").replace('=', "");
    assert_eq!(field(head, "e2b-signature"), expected);
    let mac = field(head, "X-Cube-Webhook-Signature")
        .strip_prefix("sha256=")
        .unwrap();
    let signed = [
        field(head, "X-Cube-Webhook-Timestamp").as_bytes(),
        b".",
        body,
    ]
    .concat();
    let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, b"secret");
    let bytes: Vec<u8> = (0..mac.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&mac[at..at + 2], 16).unwrap())
        .collect();
    ring::hmac::verify(&key, &signed, &bytes).unwrap();
    let event: LifecycleEvent = serde_json::from_slice(body).unwrap();
    assert_eq!(
        event.sandbox_id,
        id(2).to_string(),
        "the only type that was asked for"
    );
    let is_done = || events.hooks().get(&made.id).unwrap().done == 2;
    tokio::time::timeout(Duration::from_secs(30), async {
        while !is_done() {
            tokio::task::yield_now().await;
        }
    })
    .await
    .unwrap();
    running.abort();
    let groups = events.deliveries(&made.id, &WantedAttempts::default());
    let groups = groups.unwrap();
    let attempts = &groups[&2].attempts;
    let answers: Vec<_> = attempts
        .iter()
        .map(|a| (a.response_http_status_code, a.error_class))
        .collect();
    let failed = Some(DeliveryError::HttpError);
    assert_eq!(
        answers,
        [(Some(302), failed), (Some(500), failed), (Some(204), None)]
    );
    assert_eq!(attempts[2].request_body.as_bytes(), body.as_slice());
    assert!(!attempts[2].request_headers.contains("signature\""));
    let stats = events.stats(&made.id, &WantedAttempts::default());
    let stats = stats.unwrap();
    assert_eq!((stats.total, stats.failed), (3, 2));
    // The next server continues after it.
    let again = Hooks::open(dir.path().join("events/webhooks"), 9).unwrap();
    assert_eq!(again.get(&made.id).unwrap().done, 2);
}

#[tokio::test]
async fn private_addresses_get_nothing_unless_they_are_opened() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    get_nothing(&listener, ForbiddenAddresses::default()).await;
    // Opened by an exception, but denied.
    let denied = loopback_block();
    let forbidden = ForbiddenAddresses::new(vec![loopback_block()], vec![denied]);
    get_nothing(&listener, forbidden).await;
}

/// Checks that webhooks at loopback addresses receive nothing and are tried once.
async fn get_nothing(listener: &TcpListener, forbidden: ForbiddenAddresses) {
    let dir = tempfile::tempdir().unwrap();
    let port = listener.local_addr().unwrap().port();
    let events = events(dir.path(), Vec::new());
    for host in ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "0.0.0.0"] {
        let url = format!("http://{host}:{port}/");
        events.create(hook(&url, &[Kind::Created])).unwrap();
    }
    events
        .ring()
        .push_back(Arc::new(entry(1, 1, Kind::Created)));
    events.0.latest.store(1, Ordering::Release);
    let running = tokio::spawn(deliver::run(
        events.clone(),
        forbidden,
        Pauses(vec![Duration::ZERO; 2]),
    ));
    tokio::time::timeout(Duration::from_secs(30), async {
        while events.counts().given_up.load(Ordering::Relaxed) < 4 {
            tokio::task::yield_now().await;
        }
    })
    .await
    .unwrap();
    running.abort();
    assert_eq!(
        events.counts().failed.load(Ordering::Relaxed),
        0,
        "not tried again"
    );
    for hook in events.webhooks() {
        let groups = events.deliveries(&hook.id, &WantedAttempts::default());
        let attempt = groups.unwrap().remove(&1).unwrap().attempts.remove(0);
        assert_eq!(attempt.error_class, Some(DeliveryError::RequestError));
        let shown = serde_json::to_string(&attempt.error_message).unwrap();
        assert!(!shown.contains("127."), "{shown}");
        events.delete(&hook.id).unwrap();
        let gone = events.deliveries(&hook.id, &WantedAttempts::default());
        assert!(matches!(gone, Err(HookError::NotFound(_))));
    }
    listener.set_nonblocking(true).unwrap();
    assert!(listener.accept().is_err(), "no connection was made");
}

#[test]
fn webhooks_are_checked_kept_and_never_shown_with_their_secret() {
    let dir = tempfile::tempdir().unwrap();
    let events = events(dir.path(), Vec::new());
    let good = hook("https://example.test/h", &[Kind::Killed, Kind::Killed]);
    for wrong in [
        NewWebhook {
            url: "ftp://a".into(),
            ..good.clone()
        },
        NewWebhook {
            name: String::new(),
            ..good.clone()
        },
        NewWebhook {
            events: Vec::new(),
            ..good.clone()
        },
        NewWebhook {
            events: vec!["x".into()],
            ..good.clone()
        },
        NewWebhook {
            signature_secret: String::new(),
            ..good.clone()
        },
    ] {
        assert!(matches!(events.create(wrong), Err(HookError::Invalid(_))));
    }
    let made = events.create(good.clone()).unwrap();
    assert_eq!(made.events, ["sandbox.lifecycle.killed"]);
    let update = WebhookUpdate {
        enabled: Some(false),
        ..WebhookUpdate::default()
    };
    assert!(!events.update(&made.id, update).unwrap().enabled);
    let shown = serde_json::to_string(&events.webhooks()).unwrap();
    assert!(
        !shown.contains("\"secret\"") && !shown.contains("signature"),
        "{shown}"
    );
    let file = dir
        .path()
        .join("events/webhooks")
        .join(format!("{}.json", made.id));
    let mode =
        std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(file).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    let again = Events::open(dir.path(), "team").unwrap().0;
    assert_eq!(again.webhooks().len(), 1);
    again.delete(&made.id).unwrap();
    assert!(matches!(
        again.delete(&made.id),
        Err(HookError::NotFound(_))
    ));
    for _ in 0..32 {
        again.create(good.clone()).unwrap();
    }
    assert!(matches!(again.create(good), Err(HookError::TooMany)));
}
