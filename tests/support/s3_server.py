"""A real server that speaks S3, on this machine. For tests of sources."""

import logging
from urllib.request import Request, urlopen

import obstore
from obstore.store import S3Store

BUCKET = "bucket"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "a-key-for-tests",
    "AWS_SECRET_ACCESS_KEY": "a-secret-for-tests",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
AUTHORIZATION = "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"


class BucketServer:
    """A server of buckets; their content remains when it is closed and opened again."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._port = 0
        self.open_again()
        _host, self._port = self._server.get_host_and_port()
        for method, path in (("POST", "/moto-api/reset"), ("PUT", f"/{BUCKET}")):
            request = Request(self.endpoint + path, method=method, headers={"Authorization": AUTHORIZATION})
            urlopen(request).close()

    @property
    def endpoint(self) -> str:
        """Return the address of the server."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment that a client needs."""
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": self.endpoint}

    def store(self) -> S3Store:
        """Return the bucket of the tests."""
        return S3Store(
            BUCKET,
            endpoint=self.endpoint,
            region="us-east-1",
            access_key_id="a-key-for-tests",
            secret_access_key="a-secret-for-tests",
            client_options={"allow_http": True},
        )

    def put(self, files: dict[str, bytes]) -> None:
        """Put files into the bucket."""
        store = self.store()
        for name, content in files.items():
            obstore.put(store, name, content)

    def close(self) -> None:
        """Stop the server, so that no request is answered."""
        self._server.stop()
        assert self._server._server is not None
        self._server._server.server_close()  # moto leaves the socket open

    def open_again(self) -> None:
        """Start again on the same port, with the same content."""
        from moto.server import ThreadedMotoServer  # noqa: PLC0415  it takes a second to load

        self._server = ThreadedMotoServer("127.0.0.1", self._port, verbose=False)
        self._server.start()
