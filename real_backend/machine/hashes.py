"""SHA-256 of each file of the MoRI-IO connector, as vLLM's releases have it: which release a tree is, these say.

To add a release, take them from its official source: `sha256sum vllm/distributed/kv_transfer/kv_connector/v1/moriio/*.py`. A
test compares them with the trees that are here.
"""

KNOWN: dict[str, dict[str, str]] = {
    "0.24.0": {
        "__init__.py": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "moriio_common.py": "c0e5068c75c3e76a24b89eaab4f1783a2736a9b7b25d923561aec7ca812a72ac",
        "moriio_connector.py": "243ad33beed03e073115d0e7653023af074ee94ea9cffaaf55a3b68a766282d3",
        "moriio_engine.py": "b6e76374e0cb97a636d8df56aa8d6a7e340ff8fc1a0388e5532e0c4f39feee4e",
        "moriio_layout.py": "33d73653d9068895a17a4cfe21e795b21080ad53583c2196f7589448e6373185",
    },
    "0.25.1": {
        "__init__.py": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "moriio_common.py": "ff6d0ed3a70ebc530c1e5e17dd369c79f406eaf73cf228269cc53e64bf5d3a50",
        "moriio_connector.py": "b084dbfe3c94c635dc75a199667192e0dbfadc824cbff8dc415020872b865a9c",
        "moriio_engine.py": "fc436fde37e06375515983abab17294c44907945f3c06cc5e394a9146e96143c",
        "moriio_layout.py": "33d73653d9068895a17a4cfe21e795b21080ad53583c2196f7589448e6373185",
    },
    "0.26.0": {
        "__init__.py": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "moriio_common.py": "ff6d0ed3a70ebc530c1e5e17dd369c79f406eaf73cf228269cc53e64bf5d3a50",
        "moriio_connector.py": "bfebe2e19c844d04b0670ba1f1aa0105de65b626699dfd71c1cad4f1d3e464bf",
        "moriio_engine.py": "fc436fde37e06375515983abab17294c44907945f3c06cc5e394a9146e96143c",
        "moriio_layout.py": "39f82c67f245d184d1bb0aad3b9af749b98f2eafcc7eb52e630256e358c4a469",
    },
    "0.27.0": {
        "__init__.py": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "moriio_common.py": "4cf115fb2cc6ac82315fcd4328bd0affdfec0467525b6ea0744bec64e879b65a",
        "moriio_connector.py": "b11ffb4edf55351b40fde6e4b765ba885cfc4dd11d0e469006c6462360e8c4b3",
        "moriio_engine.py": "fc436fde37e06375515983abab17294c44907945f3c06cc5e394a9146e96143c",
        "moriio_layout.py": "39f82c67f245d184d1bb0aad3b9af749b98f2eafcc7eb52e630256e358c4a469",
    },
    "0.28.0": {
        "__init__.py": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "moriio_common.py": "0549459db86a738c58d954b3ca266d07a8880d1e4f6e0afbed75330787a97f2d",
        "moriio_connector.py": "e58925a9d70647b73cc8f58a5c5f8f93957b61205d0429d1315d971915796a00",
        "moriio_engine.py": "2c99de705171e98b9454ae20145ccb2706971e54cfa01526dec0c35bff8a9920",
        "moriio_layout.py": "39f82c67f245d184d1bb0aad3b9af749b98f2eafcc7eb52e630256e358c4a469",
    },
    "0.29.0": {
        "__init__.py": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "moriio_common.py": "9580fbe273cbe633ebc1407326b4d3e14775bfe3226541d71d1ef5184744eea4",
        "moriio_connector.py": "3965fc036178efad28bdb09be31580bfa5311beb2dbe32561e082dac4231b5fd",
        "moriio_engine.py": "d842f3772fc6588d5a329a67572324cb74709aa3df4033e64c791a1e706c8e88",
        "moriio_layout.py": "2b4ec046a78897236b0626939bb828b6ec095355097d10bca39e5f3e1c992553",
    },
    "0.30.0": {
        "__init__.py": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "moriio_common.py": "549bb4fe22dca5095515b9c0712c31cc81a9d4923881e9f112317640fd8c04ab",
        "moriio_connector.py": "c0f474bc34b579d889fae92eaf43eaca241be51a4697a187a942f0df4e6b6a98",
        "moriio_engine.py": "d842f3772fc6588d5a329a67572324cb74709aa3df4033e64c791a1e706c8e88",
        "moriio_layout.py": "2b4ec046a78897236b0626939bb828b6ec095355097d10bca39e5f3e1c992553",
    },
    "0.31.0": {
        "__init__.py": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "moriio_common.py": "819cff0ed4157533a5793abf69ac609aba1176f01ca849b10adb2be37a721a48",
        "moriio_connector.py": "2b038329f9b2837bea4d328eab80369627bf9692bbb2b03dfd906a5c683e0d89",
        "moriio_engine.py": "f43528a18b8bbeea82c20e856a2ac98f8e58147f7eceef40401476709177ab34",
        "moriio_layout.py": "d09308e8bbdb93828383e31821cd72714934d1be29d070b0cc8fe0af5bf3dd51",
    },
    "0.32.0": {
        "__init__.py": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "moriio_common.py": "819cff0ed4157533a5793abf69ac609aba1176f01ca849b10adb2be37a721a48",
        "moriio_connector.py": "6a734f000aeb69f4320cd31630411779686afaff022a396b68677fab4fdb377d",
        "moriio_engine.py": "f43528a18b8bbeea82c20e856a2ac98f8e58147f7eceef40401476709177ab34",
        "moriio_heartbeat.py": "500a1b017af44e5e562452a0bc97394f793d11c87c34acafbc72dd6b5eeb3027",
        "moriio_layout.py": "1259557856e492987ad9ec856c69020c42fff74b7b4fea5b43b970ac139a9e4a",
    },
    "0.33.0": {
        "__init__.py": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "moriio_common.py": "b14418194b379d89d24ceebf167942e4a4e51c2c5f7f3727f08ad95d8643f600",
        "moriio_connector.py": "fadd317a4dbb26040975c0303d097188ab714187223e07632d8f55c07757949b",
        "moriio_engine.py": "03f56e24a0776a721827ce51f63241f330dc640ed0707ead665246dab8dd8f7e",
        "moriio_heartbeat.py": "500a1b017af44e5e562452a0bc97394f793d11c87c34acafbc72dd6b5eeb3027",
        "moriio_layout.py": "ef8a1c7536392fd95a97840fcdccbf204e1f290607d02619b1e4f7549fad5940",
        "moriio_tp_mapping.py": "827dfaa651824ac6ff42481c937cea5d66d1a1cdae4c7eb3bb27929611319b23",
    },
}
