"""Exports: the files of a data directory at a place that needs no mount, such as an object store.

In reading order:

    place      where objects are: a directory, or a store of pyarrow (S3, GCS, Azure, HDFS)
    manifest   which objects make up the files of a shard at a moment
    export     the job: copies the bytes that were added since the last export
    exported   an export as the files and the catalog of a data directory, which only reads
"""
