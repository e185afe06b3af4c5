//! Frames of older releases, recorded as bytes. A VMM of this release reads the requests of an older server, and a
//! server of this release reads the replies of an older VMM. The files are never changed: a release that changes the
//! messages adds new files.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::{io::Write, os::unix::net::UnixStream, thread};

use model::{
    Bytes, EntropySeed, GuestPaths, HypercallPath, Identity, RestoreSpec, StartPhase, Timeline,
    VmSpec, WorkingSetPrefault,
};
use serde::de::DeserializeOwned;
use vmm_control::{
    Call, Failure, FailureKind, LostFrames, Reply, Request, SnapshotContent, VmPhase, VmStats,
    files::{FileRole, TemplateFile},
    frame,
};

/// Release 0.1, version 2 of the messages.
const REQUESTS_0_1: &[u8] = include_bytes!("recorded/requests-0.1");
const ANSWERS_0_1: &[u8] = include_bytes!("recorded/answers-0.1");

fn read<T: DeserializeOwned>(bytes: &'static [u8]) -> Vec<T> {
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let writer = thread::spawn(move || ours.write_all(bytes).unwrap());
    let mut messages = Vec::new();
    loop {
        match frame::receive(&theirs) {
            Ok((message, _)) => messages.push(message),
            Err(frame::FrameError::Closed) => break,
            Err(e) => panic!("after {} frames: {}", messages.len(), model::chain(&e)),
        }
    }
    writer.join().unwrap();
    messages
}

fn requests() -> Vec<Call> {
    let boot = VmSpec {
        memory: Bytes::mib(512),
        vcpus: 1,
        guest: GuestPaths {
            kernel: "/g/vmlinux".into(),
            initrd: "/g/initramfs.cpio".into(),
            root: "/g/base.erofs".into(),
            layer: "/g/layer.ext4".into(),
        },
        cmdline: "quiet".into(),
        hypercalls: HypercallPath::default(),
        vsock: "/s/vsock.sock".into(),
        console: Some("/s/console.log".into()),
        layer_limit: Some(Bytes::mib(64)),
    };
    let restore = RestoreSpec {
        template: "/t/base".into(),
        base: None,
        root: None,
        vsock: "/s/vsock.sock".into(),
        console: None,
        layer_limit: None,
        prefault: WorkingSetPrefault::Off,
    };
    let identity = Identity {
        hostname: "a".into(),
        machine_id: "0".repeat(32),
        entropy: EntropySeed::new([7; 32]),
    };
    let of_boot = vec![
        FileRole::Kvm,
        FileRole::Tap,
        FileRole::Vsock,
        FileRole::Console,
        FileRole::Kernel,
        FileRole::Initrd,
        FileRole::Root,
        FileRole::Layer,
        FileRole::Scratch,
    ];
    let of_template = TemplateFile::ALL.map(FileRole::Template).to_vec();
    let home = "/t/base".into();
    [
        (Request::Boot(boot), of_boot),
        (
            Request::Restore {
                spec: restore,
                home,
            },
            vec![FileRole::Base(TemplateFile::Memory)],
        ),
        (
            Request::Identity {
                identity,
                within_ms: 30_000,
            },
            vec![],
        ),
        (Request::Pause, vec![]),
        (Request::Resume, vec![]),
        (
            Request::Snapshot {
                content: SnapshotContent::Full,
            },
            of_template.clone(),
        ),
        (
            Request::Snapshot {
                content: SnapshotContent::Diff,
            },
            of_template,
        ),
        (
            Request::SaveLayer,
            vec![FileRole::Template(TemplateFile::Layer)],
        ),
        (
            Request::RecordWorkingSet,
            vec![FileRole::Template(TemplateFile::WorkingSet)],
        ),
        (Request::Stats, vec![]),
        (Request::Shutdown, vec![]),
    ]
    .map(|(request, files)| Call { request, files })
    .to_vec()
}

fn answers() -> Vec<Result<Reply, Failure>> {
    let mut timeline = Timeline::default();
    for (phase, at) in StartPhase::ALL.into_iter().zip(1..) {
        timeline.stamp(phase, at);
    }
    let stats = VmStats {
        phase: VmPhase::Exited,
        exit_reason: Some("the guest shut down".into()),
        timeline: timeline.clone(),
        exits: [("idle".to_owned(), 3)].into(),
        idle_ns: None,
        guest_private_bytes: Some(4096),
        lost_frames: LostFrames {
            to_guest: 1,
            from_guest: 2,
            refused: 3,
        },
        unknown_events: 0,
    };
    let failures = [
        FailureKind::BadSpec,
        FailureKind::BadSnapshot,
        FailureKind::WrongPhase,
        FailureKind::UnsuitableHost,
        FailureKind::NoSpace,
        FailureKind::GuestExited,
        FailureKind::AgentUnready,
        FailureKind::Io,
    ];
    let replies = [Reply::Done, Reply::Started(timeline), Reply::Stats(stats)];
    let failed = |kind| {
        Err(Failure {
            kind,
            message: "why".into(),
        })
    };
    replies
        .into_iter()
        .map(Ok)
        .chain(failures.map(failed))
        .collect()
}

#[test]
fn requests_of_release_0_1_are_read() {
    assert_eq!(read::<Call>(REQUESTS_0_1), requests());
}

#[test]
fn answers_of_release_0_1_are_read() {
    assert_eq!(read::<Result<Reply, Failure>>(ANSWERS_0_1), answers());
}

/// A VMM of release 0.1 rejects unknown fields, so a request that needs no new field must not have one. Its header has
/// zeros in place of the newest version.
#[test]
fn requests_have_the_bytes_that_release_0_1_reads() {
    let mut bytes = Vec::new();
    for call in requests() {
        let mut one = frame::encode(&call).unwrap();
        one[6..8].fill(0);
        bytes.extend(one);
    }
    assert!(bytes == REQUESTS_0_1);
}

#[test]
fn unknown_fields_of_answers_are_ignored() {
    let stats = r#"{"Ok":{"stats":{"phase":"running","exit_reason":null,"timeline":[],"exits":{},
        "guest_private_bytes":null,"later":{"a":1}}}}"#;
    let read: Result<Reply, Failure> = serde_json::from_str(stats).unwrap();
    assert!(matches!(read, Ok(Reply::Stats(_))), "{read:?}");
    let failure = r#"{"Err":{"kind":"io","message":"why","later":1}}"#;
    let read: Result<Reply, Failure> = serde_json::from_str(failure).unwrap();
    assert_eq!(read.unwrap_err().message, "why");
}
