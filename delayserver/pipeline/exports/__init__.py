"""Exports: the files of a data directory at a place that needs no mount, such as an object store.

In reading order:

    place      where objects are: a directory, or what pyarrow reaches (S3, GCS, Azure, HDFS)
    manifest   which objects make up the files of a shard at a moment
    export     the job: what has grown since the last time is copied
    exported   an export as the files and the catalog of a data directory, which only reads
"""
