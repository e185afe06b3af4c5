use std::thread;

use super::*;

/// A VMM that supports `versions` and replies to each request that it can read. Returns the versions of the
/// requests.
fn vmm(socket: UnixStream, versions: Versions) -> thread::JoinHandle<Vec<u16>> {
    thread::spawn(move || {
        let mut seen = Vec::new();
        loop {
            match frame::receive_as::<Call>(&socket, versions, None) {
                Ok(Frame { version, .. }) => {
                    seen.push(version);
                    let answer: Result<Reply, Failure> = Ok(Reply::Done);
                    frame::send_as(&socket, (version, versions), &answer, &[]).unwrap();
                }
                Err(FrameError::Version { found, ours }) => {
                    seen.push(found);
                    frame::refuse(&socket, ours).unwrap();
                }
                Err(_) => return seen,
            }
        }
    })
}

fn client(ours: Versions, theirs: Versions) -> (ControlClient, thread::JoinHandle<Vec<u16>>) {
    let (near, far) = UnixStream::pair().unwrap();
    let mut client = ControlClient::new(near, None).unwrap();
    (client.versions, client.version) = (ours, ours.oldest);
    (client, vmm(far, theirs))
}

#[test]
fn client_and_vmm_agree_on_the_newest_common_version() {
    let versions = |oldest, newest| Versions { oldest, newest };
    for (ours, theirs, seen) in [
        (versions(2, 2), versions(2, 2), vec![2, 2]),
        (versions(2, 4), versions(2, 3), vec![2, 3]),
        (versions(2, 3), versions(1, 7), vec![2, 3]),
        // The VMM no longer supports the client's oldest version.
        (versions(2, 4), versions(3, 7), vec![2, 4, 4]),
    ] {
        let (mut client, vmm) = client(ours, theirs);
        client.pause().unwrap();
        client.resume().unwrap();
        drop(client);
        assert_eq!(vmm.join().unwrap(), seen, "{ours} {theirs}");
    }
}

#[test]
fn a_vmm_without_a_common_version_is_refused_with_both_ranges() {
    let ours = Versions {
        oldest: 2,
        newest: 3,
    };
    let theirs = Versions {
        oldest: 5,
        newest: 6,
    };
    let (mut client, vmm) = client(ours, theirs);
    let error = client.pause().unwrap_err();
    assert_eq!(
        model::chain(&error),
        "no response from the VMM: the VMM supports the versions 5 to 6 of the control protocol, this program 2 to 3"
    );
    drop(client);
    assert_eq!(vmm.join().unwrap(), [2]);
}
